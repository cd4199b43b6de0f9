"""Numbers that a foreign format counts otherwise than a plan: keys of a window, tokens for steps,
batches of a rank.
"""

from collections.abc import Callable
from typing import Any

import pytest

from tests.interop.foreign_samples import GPU_NAME, LLAMA, NEOX, ON_8, TITAN, left, problems
from workbench import interop
from workbench.interop.gpt_neox import read_gpt_neox
from workbench.interop.megatron import read_megatron
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.schema import Plan, build_plan


def _megatron(*more: Any) -> ResolvedPlan:
    return read_megatron.read([*LLAMA, *more], ON_8).plan.resolve()


def _neox(**more: Any) -> ResolvedPlan:
    return read_gpt_neox.read(NEOX | more, ON_8).plan.resolve()


def _titan(more: str) -> ResolvedPlan:
    return interop.read(TITAN + more, gpu=GPU_NAME, gpus=8).plan.resolve()


STEP = 32 * 64
"""Tokens of a step of `LLAMA`."""


@pytest.mark.parametrize(
    ("read", "value"),
    [
        (lambda: _megatron("--window-size", "1023,0").shape.window, 1024),
        (lambda: _megatron("--window-size", "(0, 0)").shape.window, 1),
        (lambda: _megatron("--window-size", "-1,0").shape.window, None),
        (lambda: _neox(sliding_window_width=63).shape.window, 64),
        (lambda: _megatron("--train-tokens", 9 * STEP + 1).training.steps, 10),
        (lambda: _megatron("--train-tokens", 9 * STEP, "--train-iters", 4).training.steps, 4),
        (lambda: _megatron("--train-iters", 50, "--train-tokens", 9 * STEP).training.steps, 9),
        (
            lambda: (
                _megatron(
                    "--train-iters", 50, "--lr-warmup-tokens", 2 * STEP + 1
                ).training.optimizer.warmup_steps
            ),
            3,
        ),
        (
            lambda: (
                _megatron(
                    "--train-samples", 640, "--lr-warmup-samples", 65
                ).training.optimizer.warmup_steps
            ),
            3,
        ),
        (
            lambda: (
                _titan(
                    "[training]\nlocal_batch_size = 2\nglobal_batch_size = 64\n"
                    "[validation]\nenable = true\nsteps = 40\nlocal_batch_size = 4\n"
                ).training.evaluation.batches
            ),
            10,
        ),
    ],
)
def test_a_number_is_read_in_the_plans_unit(read: Callable[[], Any], value: Any) -> None:
    assert read() == value


def test_a_window_of_no_number_is_refused() -> None:
    assert "legal" in problems(_megatron, "--window-size", "wide")["--window-size"]


def test_a_window_is_written_as_megatron_counts_it() -> None:
    model = {"layers": 2, "hidden": 64, "heads": 4, "ffn": 128, "vocab": 512, "window": 16}
    plan = build_plan({"model": model, "cluster": {"gpu": GPU_NAME, "gpus": 2}})
    text, lost = interop.write(plan, "megatron")
    assert "--window-size 15,0" in text
    assert "model.window" not in {note.field for note in lost}


def test_batches_of_an_evaluation_are_written_for_a_rank() -> None:
    plan = Plan.of("llama-3-8b", gpu=GPU_NAME, gpus=16, strategy="zero-3").replace(
        **{"training.global_batch": 64, "training.evaluation": {"every": 10, "batches": 3}}
    )
    text, lost = interop.write(plan, "torchtitan", "0.2.2")
    assert "local_batch_size = 1\n" in text.partition("[validation]")[2]
    assert "steps = 12\n" in text.partition("[validation]")[2]
    assert not [note for note in lost if "evaluation" in note.field]


def test_an_interval_in_seconds_is_no_number_of_steps() -> None:
    text = TITAN + '[checkpoint]\nenable = true\ninterval = 3600\ninterval_type = "seconds"\n'
    found = interop.read(text, gpu=GPU_NAME, gpus=8)
    assert "checkpoint.interval" in left(found)
    assert found.plan.checkpoint.every != 3600
