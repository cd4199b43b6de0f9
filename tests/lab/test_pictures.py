"""Pictures are drawn in a child: what kills the drawing costs the picture, never the process that
asked for it.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Ask
from workbench.lab.comparison.compare import compare
from workbench.lab.live.figure import Figure, mime_bundle
from workbench.lab.pictures import pictures
from workbench.lab.pictures.pictures import PictureError, _Child

from . import synthetic

SPEC = {
    "data": {"values": [{"a": 1}]},
    "mark": "bar",
    "encoding": {"x": {"field": "a", "type": "quantitative"}},
}


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Start the drawing process as the test says; one of its own for each test."""
    made = _Child()
    monkeypatch.setattr(pictures, "_CHILD", made)
    yield lambda *command: monkeypatch.setattr(pictures, "DRAW_COMMAND", list(command))
    made.close()


def limited() -> list[str]:
    return ["sh", "-c", 'ulimit -v 4000000; exec "$0" "$@"', *pictures.DRAW_COMMAND]


def test_one_child_draws_all_pictures_and_outlives_a_bad_one(child: Callable[..., Any]) -> None:
    first = pictures.render_svg(SPEC)
    process = pictures._CHILD.process
    with pytest.raises(PictureError):
        pictures.render_svg({"mark": "nonsense"})
    assert first.startswith("<svg") and pictures.render_svg(SPEC) == first
    assert process is not None and pictures._CHILD.process is process and process.poll() is None


def test_a_limit_on_address_space_costs_pictures_and_nothing_else(
    child: Callable[..., Any], tmp_path: Path
) -> None:
    child(*limited())
    comparison = compare(synthetic.profile("estimated", 2))
    text = comparison.to_html(tmp_path / "report.html").read_text()
    assert len(comparison.left_out) == len(comparison.figures()) > 2 and "<svg" not in text
    assert all("was ended by SIG" in why and "ulimit -v" in why for why in comparison.left_out)
    assert "Charts left out:" in text and "Peak memory by rank" in text
    shown = mime_bundle(SPEC, "words")
    assert "image/svg+xml" not in shown and shown["text/plain"].startswith(
        "words\nPicture left out: the process that"
    )
    assert pictures._CHILD.process is None


@pytest.mark.parametrize(
    "command, says",
    [
        (["sleep", "60"], "gave no answer for 0 s"),
        (["false"], "exit code 1"),
        (["/no/such"], "cannot be started"),
    ],
)
def test_a_child_that_draws_nothing_is_given_up(
    child: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, command: list[str], says: str
) -> None:
    child(*command)
    monkeypatch.setattr(pictures, "DRAW_TIMEOUT_SECONDS", 0.2)
    for _ in range(2):  # the second time no other child is tried
        with pytest.raises(PictureError, match=says):
            Figure("a", "title", "", SPEC, [{"a": 1}]).svg()


def test_the_shell_says_which_charts_are_left_out(
    ask: Ask, child: Callable[..., Any], tmp_path: Path
) -> None:
    child(*limited())
    plan = tmp_path / "plan.yaml"
    plan.write_text("model: gpt2\ncluster: {gpu: h100-sxm-80gb, gpus: 2}\n")
    code, out, _ = ask("compare", plan, "--no-rehearse", "--html", tmp_path / "report.html")
    assert code == 0 and "charts left out:" in out and (tmp_path / "report.html").exists()
