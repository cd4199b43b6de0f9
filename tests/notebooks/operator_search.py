"""What the notebook on the search of operator strategies shows."""

import re

import pytest

from tests.notebooks.operator_strategies import text
from tests.notebooks.shown import Shown

CASES = ("2 GPUs, 1 sequence", "4 GPUs, 2 sequences", "8 GPUs, 1 sequence", "8 GPUs, 8 sequences")


def strategies(shown: Shown, words: str, operator: str) -> list[str]:
    """Strategies of an operator in the table of the cell, by column."""
    lines = text(shown, words).splitlines()
    rows = [line.split() for line in lines if line.startswith(f"{operator} ")]
    return [cell for _, *cells in rows for cell in cells]


def check(shown: Shown) -> None:
    """Megatron's pairs are found, pins followed, and redistributions are the cheapest."""
    check_pairs(shown)
    check_pins_and_redistribution(shown)
    times = shown.table("CASES = [")
    slower = shown.values("The pair, slower than what is found")
    for case in CASES:
        found, pair = times[case][:2]
        expected = 100 * (pair / found - 1)
        assert slower[case]["estimated"] == pytest.approx(expected, rel=0.1, abs=0.5)


def check_pairs(shown: Shown) -> None:
    """On two GPUs the pair is found, and something else where a sequence is split by eight."""
    assert text(shown, "two = operators_of(2)").count("Redistributions: 0") == 1
    times = shown.table("CASES = [")
    for case in CASES:
        found, pair, rows, replicated = times[case]
        assert found <= pair < replicated and not rows < found
    assert times[CASES[0]][0] == times[CASES[0]][1]
    for column, inner in (("attention.qkv", "attention.o"), ("mlp.up", "mlp.down")):
        words = 'gemms({case: choices["found"]'
        assert strategies(shown, words, column)[:2] == ["((1,1),(1,2))", "((2,1),(1,2))"]
        assert strategies(shown, words, inner)[:2] == ["((1,2),(2,1))", "((2,2),(2,1))"]
        by_tokens = {strategies(shown, words, name)[2] for name in (column, inner)}
        assert by_tokens == {"((1,8,1),(1,1))"}
        assert strategies(shown, "tight = operators_of", column) == ["((1,1),(1,8))"]


def check_pins_and_redistribution(shown: Shown) -> None:
    """A conflict's price is what the other layout costs; the fewest microseconds are fewer."""
    why = text(shown, "listed(followed)")
    assert why.count("pinned by you") == 2
    (more,) = re.findall(r"mlp.up's layout costs ([\d.]+ ms) more", why)
    assert f"{more} more" in text(shown, "as_up - as_it_is")
    totals = {
        (row["pair"], row["way"]): row["end"]
        for row in shown.chart("Two redistributions")
        if row.get("end") is not None
    }
    assert len(totals) == 4
    for pair in {pair for pair, _ in totals}:
        assert totals[pair, "least time"] < totals[pair, "gather and slice"]
    assert totals["rows → columns", "least time"] == pytest.approx(27.7, rel=0.05)
