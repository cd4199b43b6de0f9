"""The plan that `operators -o` writes: legal for every catalog model, as it was priced, and
verified on ranks; a memory limit answered with a change of the plan.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Ask
from tests.parallel.small import GPT, LLAMA, plan
from workbench.engine.verify.equivalence import verify
from workbench.errors import PlanError
from workbench.plan.catalog import catalog
from workbench.plan.rules.supported import require
from workbench.plan.schema import Plan
from workbench.planner import estimate
from workbench.planner.autoshard import choose_for_plan, plan_with

H100 = ["--model", "llama-3-8b", "--gpu", "h100-sxm-80gb", "--gpus", 8]


RUN = [
    name
    for name, entry in sorted(catalog.models().items())
    if not any((entry.shape.moe, entry.shape.mla, entry.shape.qk_norm, entry.shape.unmodelled))
    and entry.shape.positions != "alibi"
]
"""Models of the catalog that run, with dense layers."""


@pytest.mark.drawn(12)
@pytest.mark.parametrize("gpus", [2, 4, 8])
@pytest.mark.parametrize("model", [pytest.param(name, marks=pytest.mark.slow) for name in RUN])
def test_what_is_written_for_a_catalog_model_is_legal(model: str, gpus: int) -> None:
    start = Plan.of(model, gpu="h100-sxm-80gb", gpus=gpus, strategy="ddp")
    require(start.resolve(), "run")
    found = plan_with(start, choose_for_plan(start.resolve()))
    require(found.resolve(), "run")
    assert found.strategy.operators and found.resolve().strategy.tensor.ranks == gpus


@pytest.mark.parametrize(
    ("shape", "mesh", "changes"),
    [
        (LLAMA, (1, 1, 2), {}),
        (GPT, (1, 1, 4), {}),
        (GPT, (1, 1, 4), {"strategy.recompute": "full"}),
        pytest.param(LLAMA, (1, 1, 8), {}, marks=pytest.mark.slow),
    ],
)
def test_what_is_written_equals_one_device(
    shape: dict[str, Any], mesh: tuple[int, ...], changes: dict[str, Any]
) -> None:
    start = plan(*mesh, shape=shape, layers=2, changes=changes)
    built = plan_with(start, choose_for_plan(start.resolve()))
    answer = verify(built, "fp64")
    assert answer["passed"] and built.strategy.operators, answer


ODD = {"layers": 2, "hidden": 48, "heads": 3, "ffn": 96, "vocab": 509}
CODE = {"python": "tests.parallel.users_model:build_plain", "vocab": 260}
TOO_MANY = {"tensor": {"size": 4, "sequence": True}}


@pytest.mark.parametrize(
    ("model", "gpus", "strategy", "batch", "ranks", "sequences"),
    [
        (CODE, 3, {"tensor": {"size": 3}}, (6, 2), 3, 2),
        (CODE, 3, {"tensor": {"size": 3}}, (6, 2), None, 2),
        (CODE, 3, {}, (6, 3), 3, 3),
        (ODD, 3, {}, (6, 3), 3, 3),
        (ODD, 4, TOO_MANY, (8, 2), None, 2),
        (ODD, 4, TOO_MANY, (8, 2), 2, 1),
        (ODD, 6, {"tensor": {"size": 6}, "pipeline": {"size": 2}}, (8, 2), 3, 2),
        (ODD, 2, {"tensor": {"size": 2, "algorithm": "2d"}}, (8, 2), 2, 2),
    ],
)
def test_the_plan_that_is_written_is_checked_not_the_one_that_it_replaces(
    model: dict[str, Any],
    gpus: int,
    strategy: dict[str, Any],
    batch: tuple[int, int],
    ranks: int | None,
    sequences: int,
    ask: Ask,
    tmp_path: Path,
) -> None:
    start, written = tmp_path / "plan.yaml", tmp_path / "written.yaml"
    plan = {
        "model": model,
        "cluster": {"gpu": "h100-sxm-80gb", "gpus": gpus},
        "strategy": strategy,
        "training": {"sequence_length": 62, "global_batch": batch[0], "micro_batch": batch[1]},
    }
    start.write_text(json.dumps(plan))
    with pytest.raises(PlanError):
        Plan.load(start).resolve()
    chosen = [] if ranks is None else ["--ranks", ranks]
    code, _, said = ask("operators", start, *chosen, "--allow-code", "-o", written, "--json")
    assert code == 0, said
    full = Plan.load(written).resolve()
    assert full.strategy.tensor.ranks == (ranks or gpus)
    assert (full.training.micro_batch, full.training.global_batch) == (sequences, batch[0])


def test_what_is_illegal_in_the_written_plan_is_said_of_it(ask: Ask, tmp_path: Path) -> None:
    start = tmp_path / "plan.yaml"
    batch = {"sequence_length": 62, "global_batch": 6, "micro_batch": 3}
    cluster = {"gpu": "h100-sxm-80gb", "gpus": 3}
    start.write_text(json.dumps({"model": ODD, "cluster": cluster, "training": batch}))
    code, _, said = ask("operators", start, "--ranks", 2)
    assert code == 2
    assert "is 3, which tensor 2 x context 1 x pipeline 1 = 2 does not divide" in said


@pytest.mark.parametrize(
    ("limit", "ranks", "changes"),
    [(60, 8, {}), (25, 8, {"strategy.recompute": "full"}), (60, 2, {"strategy.data.zero": 1})],
)
def test_a_limit_is_that_of_the_written_plans_estimate(
    ask: Ask, tmp_path: Path, limit: int, ranks: int, changes: dict[str, Any]
) -> None:
    path = tmp_path / "plan.yaml"
    batch = "training.micro_batch=1"
    words = ["operators", *H100, "--strategy", "ddp", "--set", batch, "--ranks", ranks]
    code, out, err = ask(*words, "--memory", limit, "-o", path, "--json")
    assert code == 0, err
    found = json.loads(out)
    assert found["changes"] == changes and found["limit"] == limit * 2**30
    for field, value in changes.items():
        assert f"with {field}: {value} these are" in found["reason"]
    full = Plan.load(path).resolve()
    require(full, "run")
    assert full.strategy.tensor.ranks == ranks
    estimated = estimate(Plan.load(path)).peak_bytes_by_rank
    assert max(estimated.values()) == found["peak"] <= limit * 2**30


def test_where_nothing_fits_the_least_number_is_said(ask: Ask) -> None:
    code, _, err = ask("operators", *H100, "--strategy", "ddp", "--memory", 10, "--json")
    (least,) = re.findall(r"is 10 GiB a rank, but the least that was found takes ([\d.]+) GiB", err)
    assert code == 2 and "with strategy.recompute: full" in err
    code, _, err = ask("operators", *H100, "--strategy", "ddp", "--memory", least, "--json")
    assert code == 0, err


@pytest.mark.parametrize("limit", [0, -1, "nan"])
def test_a_limit_that_is_no_size_is_not_blamed_on_the_plan(ask: Ask, limit: float | str) -> None:
    code, _, err = ask("operators", *H100, "--strategy", "ddp", "--memory", limit)
    assert code == 2 and "GiB a rank; legal: more than 0 (a byte or more)" in err


def test_strategies_beyond_the_memory_of_a_gpu_say_so(ask: Ask) -> None:
    words = ["--gpu", "h100-sxm-80gb", "--gpus", 2, "--strategy", "ddp", "--json"]
    for model, fits in (("llama-2-70b", False), ("gpt2", True)):
        code, out, err = ask("operators", "--model", model, *words)
        assert code == 0, err
        found = json.loads(out)
        assert (found["bytes"] <= 80 * 2**30) == fits
        assert ("so they do not fit; a memory limit finds what does" in found["reason"]) != fits


@pytest.mark.parametrize("mode", ["recursive_programming", "sharding_propagation"])
def test_pins_are_kept_in_the_written_plan(ask: Ask, tmp_path: Path, mode: str) -> None:
    path = tmp_path / "plan.yaml"
    pin = 'strategy.operators={blocks.*.mlp.up: "((1,1),(1,8))"}'
    words = [*H100, "--strategy", "ddp", "--set", pin, "--mode", mode, "-o", path]
    code, out, err = ask("operators", *words)
    assert code == 0, err
    assert "pinned by you" in out
    kept = Plan.load(path)
    assert kept.strategy.operators["blocks.*.mlp.up"] == "((1,1),(1,8))"
    require(kept.resolve(), "run")


def test_an_unknown_mode_is_refused(ask: Ask) -> None:
    code, _, err = ask("operators", *H100, "--strategy", "ddp", "--mode", "magic", "--json")
    assert code == 2 and "--mode: is 'magic'; legal: dynamic_programming, recursive" in err
