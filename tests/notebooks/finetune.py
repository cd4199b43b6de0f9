"""What the notebook on fine-tuning shows."""

from tests.notebooks.shown import Shown, assert_sources_agree


def check(shown: Shown) -> None:
    """Adapters need a fraction of the states, instruments agree, and the merged model answers."""
    share = {name: row[1] for name, row in shown.table("methods = {").items()}
    assert share["full"] == 1 and share["LoRA, 4-bit base"] < share["LoRA"] < 0.15
    assert_sources_agree(shown.peaks("memory_by_plan({"), estimated=0.03, rehearsed=0.02)
    losses = [row for row in shown.chart("charts.loss(") if row["text"] == "validation"]
    assert len(losses) == 2 and losses[-1]["loss"] < losses[0]["loss"]
    base, adapters, merged = (row[0] for row in shown.table("sizes = {").values())
    assert adapters < 0.25 * base < merged
    answers = "".join(output["text"] for output in shown.of("question = "))
    assert "after: 'Return" in answers and "before: 'Return" not in answers
