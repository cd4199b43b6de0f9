"""The notebook on operator strategies, headless: one product by hand, Megatron's pairs found, and
what is found beside them, pins and search modes, redistribution, and a plan that is verified and
run on four ranks.
"""

import math
import re
from pathlib import Path
from typing import Any

import pytest

from .notebooks import executed

TIMEOUT = 400


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT)
def test_the_operator_strategies_notebook_runs_headless(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    outputs_by_source = executed(
        "15_operator_strategies.ipynb", tmp_path, monkeypatch, timeout=TIMEOUT
    )

    def of(words: str) -> list[Any]:
        """Outputs of the one cell that has the words."""
        (outputs,) = (outputs for source, outputs in outputs_by_source.items() if words in source)
        return outputs

    def table(words: str) -> list[str]:
        """Lines of the tables of the cell with the words."""
        tables = [o.data["text/plain"] for o in of(words) if o.output_type != "stream"]
        return [line for text in tables for line in text.splitlines()]

    def strategies(words: str, operator: str) -> list[str]:
        """Strategies of an operator, in the table of the cell with the words."""
        rows = [line.split() for line in table(words) if line]
        return [form for name, *cells in rows if name == operator for form in cells if "((" in form]

    def figures(words: str, row: str) -> list[float]:
        """The figures that end the rows which begin so, of the table of the cell with the words."""
        found = [line.split(row, 1)[1] for line in table(words) if row in line]
        return [float(figure) for line in found for figure in line.split()]

    assert "bytes by hand equal the planner's" in of("planned == by_hand(text)")[0].text
    assert of("two = operators_of(2)")[0].text.endswith("Redistributions: 0\n")
    assert "mlp.up by columns and mlp.down by its inner" in of("two = operators_of(2)")[0].text
    pair_found, pair, _, replicated = figures('found["rows only"]', "2 GPUs, 1 sequence")
    assert pair_found == pair < replicated
    for case in ("4 GPUs, 2 sequences", "8 GPUs, 1 sequence", "8 GPUs, 8 sequences"):
        least, pair, rows, replicated = figures('found["rows only"]', case)
        assert least < pair < replicated
        assert least < rows if "8 seq" in case else math.isnan(rows)
    for column, inner in (("attention.qkv", "attention.o"), ("mlp.up", "mlp.down")):
        alone, beside_rows, by_tokens = strategies("GEMMS = (", column)[:3]
        assert (alone, beside_rows) == ("((1,1),(1,2))", "((2,1),(1,2))")
        assert strategies("GEMMS = (", inner)[:2] == ["((1,2),(2,1))", "((2,2),(2,1))"]
        assert by_tokens == strategies("GEMMS = (", inner)[2] == "((1,8,1),(1,1))"
        assert strategies("usual, tight = ", column) == ["((1,1),(1,2))"]
        assert strategies("usual, tight = ", inner) == ["((1,1,2),(2,1),(1,2,1))"]
        assert strategies("usual, tight = ", column.split(".")[0] + "_norm") == ["((1,2,1),(1,))"]
    activations, gradients = (
        figures("def sent(", what)[0::3]  # MiB of what is found, of the pair
        for what in ("activations", "gradients of weights")
    )
    assert activations[0] + gradients[0] < activations[1] and gradients[1] == 0 < gradients[0]
    why = of("listed(followed)")[0].data["text/plain"]
    assert re.search(r"mlp_norm .*conflict between attention_norm and mlp.up: .* more", why)
    assert why.count("pinned by you") == 2
    (more,) = re.findall(r"mlp.up's layout costs ([\d.]+ ms) more", why)
    assert f"{more} more" in of("as_up - as_it_is")[0].text
    followed, recursive, exact = (
        figures("for mode in MODES", mode)[0::2]
        for mode in ("sharding_propagation", "recursive_programming", "dynamic_programming")
    )
    assert all(a >= b >= c for a, b, c in zip(followed, recursive, exact, strict=True))
    assert followed[1] > exact[1]
    steps = of("mesh.redistribution.steps(")[0].data["text/plain"]
    assert "all_to_all" in steps and "reduce_scatter" in steps
    verified = of("wb.verify(")[0].data["text/plain"]
    assert "'passed': True" in verified
    assert of("together.nunique(")[0].text == "calls agree: True\n"
    peaks = [
        figures("together.nunique(", f"peak of rank 0, MiB ({source})")[0]
        for source in ("estimated", "rehearsed", "measured")
    ]
    assert peaks[0] == pytest.approx(peaks[2], rel=1e-3) and peaks[1] == peaks[2]
    first, last = (
        figures("together.nunique(", f"loss of the {which} step (measured)")[0]
        for which in ("first", "last")
    )
    assert last < first
    titles = ("What each of four ranks holds", "GPT-3 6.7B: what is", "Two redistributions of")
    for words in (*titles, "charts.memory("):
        (figure,) = (o for o in of(words) if o.output_type == "execute_result")
        assert "application/vnd.vegalite.v5+json" in figure.data
