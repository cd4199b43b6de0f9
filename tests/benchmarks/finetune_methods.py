"""The cheapest ways to fine-tune models of 7, 70 and 405 billion parameters: `python -m
tests.benchmarks.finetune_methods [--models llama-2-7b ..]`.

100 M tokens in sequences of 4,096, 64 a step, on H100s: `workbench search --methods`, and once more
without offload for the fewest GPUs. Prints the table of `docs/finetune.md`; every figure is
estimated.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import workbench as wb
from workbench.planner.methods.method_comparison import MethodComparison
from workbench.planner.search import Candidate
from workbench.planner.search.results.strategy_summary import strategy_summary
from workbench.units import days_text, dollars_text, percent_text, signed_text

MODELS = {"llama-2-7b": 8, "llama-3-70b": 64, "llama-3.1-405b": 512}
"""Model -> GPUs at most."""
TOKENS = 1e8
TASK = {"sequence_length": 4096, "global_batch": 64}
NO_OFFLOAD = "strategy.data.offload=none"
HEADS = (
    "model",
    "method",
    "states, of full",
    "fewest GPUs, no offload",
    "lowest cost",
    "of full's cost",
    "its strategy",
    "shortest",
)


def table_rows(model: str) -> Iterator[tuple[str, ...]]:
    """A row of the table for each method, under `HEADS`."""
    cluster = {"gpu": "h100-sxm-80gb", "gpus": MODELS[model]}
    plan = wb.Plan.model_validate({"model": model, "cluster": cluster, "finetune": TASK})
    found = wb.search_methods(plan, tokens=TOKENS)
    alone = wb.search_methods(plan, tokens=TOKENS, where=[NO_OFFLOAD])
    first = f"{model}, up to {MODELS[model]} GPUs"
    for method, device in zip(found.methods, alone.methods):
        cheapest, shortest = method.best("lowest cost"), method.best("shortest")
        assert cheapest and shortest and method.states and found.full.states
        saved = found.saved(method, "lowest cost")
        assert saved is not None
        yield (
            first,
            method.words,
            percent_text(method.states.total / found.full.states.total),
            _bill(alone, device.best("fewest GPUs")),
            _bill(found, cheapest),
            ""
            if method is found.full
            else signed_text(-saved["dollars"], percent_text(saved["dollars"])),
            strategy_summary(cheapest.plan),
            _bill(found, shortest),
        )
        first = ""


def _bill(found: MethodComparison, one: Candidate | None) -> str:
    if one is None:
        return "none fits"
    bill = found.bill(one)
    assert bill.dollars is not None
    return f"{bill.gpus}: {days_text(bill.hours / 24)}, {dollars_text(bill.dollars)}"


def line(row: tuple[str, ...]) -> str:
    """A row as Markdown."""
    return f"| {' | '.join(row)} |".replace("|  |", "| |")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    models = parser.parse_args().models
    print(f"| {' | '.join(HEADS)} |\n|{'---|' * len(HEADS)}")
    for model in models:
        for row in table_rows(model):
            print(line(row))


if __name__ == "__main__":
    main()
