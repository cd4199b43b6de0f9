"""Stages, submeshes and operator strategies searched together: the division equals brute force,
stages are priced by the estimate of their plan, and what is written runs and equals one device.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import Ask
from tests.parallel.small import LLAMA, plan
from workbench.engine.verify.equivalence import verify
from workbench.errors import PlanError
from workbench.plan.rules.strategy.operator_rules import pieces
from workbench.plan.rules.supported import require
from workbench.plan.schema import Plan
from workbench.planner.search import search
from workbench.planner.search.joint.choice_pricing import ChoicePricing
from workbench.planner.search.joint.choice_search import best_division, stages_of
from workbench.planner.search.joint.joint_plans import written
from workbench.planner.search.joint.joint_space import JointChoice, Submesh, joint_space
from workbench.planner.search.joint.stage_division import Costs, StageDivision
from workbench.planner.search.joint.stage_estimates import StageFigures
from workbench.planner.search.joint.stage_lines import StageLines
from workbench.planner.search.search_space import SearchSpace
from workbench.planner.search.unequal.estimates import estimated_figures


def least_of_all(costs: Mapping[int, Costs], devices: int, layers: int, microbatches: int) -> float:
    """Seconds of the best of all partitions and submeshes; infinite where none fits."""
    best = np.inf
    for stages in range(1, min(layers, devices) + 1):
        for cuts in itertools.combinations(range(1, layers), stages - 1):
            counts = np.diff([0, *cuts, layers])
            for submeshes in itertools.product(costs, repeat=stages):
                if sum(submeshes) == devices:
                    times = [
                        costs[m][stages - 1 - i, int(i == 0), int(i == stages - 1), count]
                        for i, (m, count) in enumerate(zip(submeshes, counts))
                    ]
                    if np.isfinite(max(times)):
                        best = min(best, sum(times) + (microbatches - 1) * max(times))
    return float(best)


@pytest.mark.drawn(40)
@pytest.mark.parametrize("seed", range(200))
def test_the_division_is_the_best_of_all(seed: int) -> None:
    drawn = np.random.default_rng(seed)
    layers, devices, microbatches = (int(drawn.integers(1, most + 1)) for most in (6, 8, 8))
    costs = {}
    for ranks in (m for m in (1, 2, 4, 8) if m <= devices):
        shape = (min(layers, devices), 2, 2, layers + 1)
        own = drawn.random(shape) * np.arange(layers + 1)
        own[drawn.random(shape) < 0.2] = np.inf  # does not fit
        own[..., 0] = np.inf
        costs[ranks] = own
    found = StageDivision(costs, devices, microbatches).best()
    best = least_of_all(costs, devices, layers, microbatches)
    assert (np.inf if found is None else found.seconds) == pytest.approx(best, rel=1e-12)
    if found is not None:
        assert sum(found.layers) == layers and sum(found.submeshes) == devices


EXPERTS: tuple[dict[str, Any] | None, ...] = (
    None,
    {"experts": 8, "top_k": 2, "ffn": 512},
    {"experts": 4, "top_k": 1, "ffn": 1024, "shared": 1, "first_dense": 1},
    {"experts": 4, "top_k": 2, "ffn": 512, "first_dense": 2},
)


def small_space(layers: int, tied: bool = False, moe: dict[str, Any] | None = None) -> SearchSpace:
    model: dict[str, Any] = {"layers": layers, "hidden": 512, "heads": 8, "kv_heads": 4}
    model |= {"ffn": 1536, "vocab": 32000, "mlp": "swiglu", "tied": tied, "moe": moe}
    plan: dict[str, Any] = {"model": model, "cluster": {"gpu": "a100-sxm-80gb", "gpus": 8}}
    training = {"sequence_length": 1024, "global_batch": 32}
    return joint_space(Plan.model_validate(plan | {"training": training}))


def drawn_choice(drawn: np.random.Generator) -> JointChoice:
    tensor, replicas = ((1, 2), (2, 1), (2, 2), (4, 1), (2, 4))[drawn.integers(5)]
    return JointChoice(
        Submesh(tensor, replicas), 2 ** int(drawn.integers(3)), int(drawn.integers(4))
    )


@pytest.mark.drawn(12)
@pytest.mark.parametrize("experts", range(len(EXPERTS)))
@pytest.mark.parametrize("seed", range(40))
def test_stages_are_what_the_estimate_says_of_their_plan(seed: int, experts: int) -> None:
    drawn = np.random.default_rng(seed)
    space = small_space(9 + experts, bool(drawn.integers(2)), EXPERTS[experts])
    setting, choice = space.fixed_configs[0], drawn_choice(drawn)
    lines = ChoicePricing(space, setting).lines(choice)[0]
    total, least = lines.num_layers, lines.least
    cuts = np.sort(drawn.choice(np.arange(least, total), lines.stages - 1, replace=False))
    counts = [int(n) for n in np.diff([0, *cuts, total])]
    division = tuple(
        (int(drawn.integers(len(lines.variants))), count, int(drawn.integers(count + 1)))
        for count in counts
    )
    stages = stages_of(lines, division)
    figures = lines.estimates.figures(stages)
    plan = written(space, setting, choice, stages).resolve()
    seconds, _, peak = estimated_figures(plan)
    assert figures.step_seconds(lines.microbatches) == pytest.approx(seconds, rel=1e-12)
    assert figures.peak.max() == pytest.approx(peak, rel=1e-12)


SCHEDULES = ("zb-v", 2), ("interleaved", 2), ("zb-h1", 1)


@pytest.mark.drawn(6)
@pytest.mark.parametrize("seed", range(60))
def test_equal_stages_are_what_the_estimate_says_of_their_plan(seed: int) -> None:
    """With several stages a rank, or split backwards; and as few layers recomputed as fit."""
    drawn = np.random.default_rng(seed)
    space = small_space(int(drawn.choice([8, 9, 12])), tied=bool(drawn.integers(2)))
    schedule, chunks = SCHEDULES[drawn.integers(3)]
    submesh = Submesh(*((1, 2), (2, 1), (2, 2), (4, 1))[drawn.integers(4)])
    choice = JointChoice(submesh, 1, int(drawn.integers(4)), schedule, chunks)
    division, variants = ChoicePricing(space, space.fixed_configs[0]).equal_division(choice)
    free = list(division.within(variants, np.inf, np.inf))
    assert len(free) == len(variants)
    memory = min(one.peak for one in free) * drawn.uniform(0.7, 1.0)
    for found in (*free, *division.within(variants, memory, np.inf)):
        full = written(space, space.fixed_configs[0], choice, found.stages).resolve()
        seconds, _, peak = estimated_figures(full)
        assert (found.seconds, found.peak) == pytest.approx((seconds, peak), rel=1e-12)
        assert full.strategy.pipeline.schedule == schedule and full.sizes["pipeline"] > 1
    for found in division.within(variants, memory, np.inf):
        again = max(stage.recomputed for stage in found.stages)
        at = next(i for i, v in enumerate(variants) if v[1] == found.stages[1].strategies)
        assert found.peak <= memory
        if again:
            assert division.recomputing(variants[at], again - 1).peak > memory


def pipelined(figures: StageFigures, microbatches: int) -> float:
    """What divisions are chosen by: what follows the last microbatch counts as a share of each."""
    each = figures.seconds + sum(figures.after.values()) / microbatches
    return float(each.sum() + (microbatches - 1) * each.max())


@pytest.mark.drawn(6)
@pytest.mark.parametrize("experts", range(len(EXPERTS)))
@pytest.mark.parametrize("seed", range(20))
def test_a_choice_is_divided_as_well_as_any_way_that_fits(seed: int, experts: int) -> None:
    drawn = np.random.default_rng(seed)
    space = small_space(4, moe=EXPERTS[experts])
    choice = replace(drawn_choice(drawn), submesh=Submesh(int(2 ** drawn.integers(3)), 1))
    choice = replace(choice, submesh=replace(choice.submesh, replicas=4 // choice.submesh.tensor))
    lines = ChoicePricing(space, space.fixed_configs[0]).lines(choice)[0]
    lines = StageLines(lines.estimates, lines.variants[:2], 4)
    every = []
    for first in range(lines.least, 4):
        options = [
            [(v, n, r) for v in range(len(lines.variants)) for r in range(n + 1)]
            for n in (first, 4 - first)
        ]
        for division in itertools.product(*options):
            figures = lines.estimates.figures(stages_of(lines, division))
            every.append((pipelined(figures, lines.microbatches), float(figures.peak.max())))
    peaks = sorted(peak for _, peak in every)
    for memory in (peaks[0] * 0.999, peaks[len(peaks) // 3], peaks[-1]):
        best = min((seconds for seconds, peak in every if peak <= memory), default=None)
        found = best_division(lines, memory)
        own = found and pipelined(found.figures, lines.microbatches)
        assert own == (best and pytest.approx(best, rel=1e-9))


def test_what_is_found_is_legal_and_as_it_was_asked(ask: Ask, tmp_path: Path) -> None:
    path = tmp_path / "best.yaml"
    words = ["--model", "gpt3-6.7b", "--gpu", "h100-sxm-80gb", "--gpus", 8, "--space", "operators"]
    words += ["--where", "strategy.pipeline.size=2", "--where", "strategy.tensor.size=2"]
    code, out, err = ask("search", *words, "--top", 2, "-o", path, "--json")
    assert code == 0, err
    found = json.loads(out)
    full = Plan.load(path).resolve()
    require(full, "run")
    assert full.sizes["pipeline"] == full.sizes["tensor"] == full.sizes["data"] == 2
    assert full.strategy.operators and found["top"][0]["seconds"] <= found["top"][1]["seconds"]


def test_strategies_that_the_plan_names_are_kept() -> None:
    start = plan(1, 1, 4, shape=LLAMA, layers=2)
    pinned = {"blocks.*.mlp.down": "((2,1),(1,1))"}
    start = start.replace(**{"strategy.tensor.size": 2, "strategy.operators": pinned})
    found = search(start, space="operators", top=3).top
    assert found
    for one in found:
        full = one.plan.resolve()
        assert full.sizes["tensor"] % 2 == 0
        assert pieces(full)["blocks.1.mlp.down"]["rows"] == 2


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("blocks.0.mlp.down", "tell layers apart"),
        ("blocks.*.mlp.sideways", "names no operator of the model"),
        ("blocks.*.mlp.up", "is ((1,1),(1,7)) for mlp.up"),
    ],
)
def test_strategies_that_no_plan_can_keep_are_refused(pattern: str, said: str) -> None:
    pinned = {"strategy.operators": {pattern: "((1,1),(1,7))"}}
    start = plan(1, 1, 4, shape=LLAMA, layers=2).replace(**pinned)
    with pytest.raises(PlanError, match=re.escape(said)):
        search(start, space="operators", top=1)


def test_latent_attention_is_refused(ask: Ask) -> None:
    words = ["--model", "deepseek-v2-lite", "--gpu", "h100-sxm-80gb", "--gpus", 8]
    code, _, err = ask("search", *words, "--space", "operators", "--json")
    assert code == 2 and "--space: is 'operators', and deepseek-v2-lite has model.mla" in err


MIXED = {**LLAMA, "moe": {"experts": 4, "top_k": 2, "ffn": 32, "shared": 1, "first_dense": 1}}


def test_strategies_of_layers_with_and_without_experts_are_kept() -> None:
    start = plan(1, 1, 4, shape=MIXED, layers=3)
    pinned = {"blocks.*.mlp.down": "((2,1),(1,1))", "blocks.*.mlp": "((1,),(2,))"}
    start = start.replace(**{"strategy.tensor.size": 2, "strategy.operators": pinned})
    where = ["strategy.pipeline.size=2", "strategy.tensor.size=2"]
    found = search(start, space="operators", where=where, top=1).top[0].plan.resolve()
    assert pieces(found)["blocks.0.mlp.down"]["rows"] == 2
    for layer in (1, 2):
        assert pieces(found)[f"blocks.{layer}.mlp"] == {"rows": 1, "width": 2}
    assert found.strategy.pipeline.partition == [2, 1]
    with pytest.raises(PlanError, match="tell layers apart"):
        search(
            start.replace(**{"strategy.operators": {"blocks.1.mlp": "((1,),(2,))"}}),
            space="operators",
        )


@pytest.mark.parametrize("shape", [LLAMA, MIXED])
def test_a_found_pipeline_equals_one_device(shape: dict[str, Any]) -> None:
    start = plan(1, 1, 4, shape=shape, layers=2 if shape is LLAMA else 3)
    where = ["strategy.pipeline.size=2", "strategy.tensor.size=2"]
    found = search(start, space="operators", where=where, top=1).top[0].plan
    answer = verify(found, "fp64")
    assert answer["passed"] and found.strategy.operators, answer
