"""Stages, submeshes and operator strategies searched together: the division equals brute force, a
stage's line equals its own search, and what is written runs and equals one device.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import Ask
from tests.parallel.small import LLAMA, plan
from workbench.engine.verify.equivalence import verify
from workbench.plan.model.model_shape import Shape
from workbench.plan.rules.supported import require
from workbench.plan.schema import Plan
from workbench.planner.autoshard import TensorBytes, ideal_machine
from workbench.planner.autoshard.device_mesh import logical_mesh
from workbench.planner.autoshard.for_plans.stage_cost import StageCosts
from workbench.planner.autoshard.graph_pricing import GraphPricing
from workbench.planner.search import search
from workbench.planner.search.joint.stage_choices import StageChoices
from workbench.planner.search.joint.stage_division import Costs, StageDivision
from workbench.planner.search.joint.stage_seconds import StageLimits, stage_seconds

SHAPE = Shape(layers=12, hidden=1024, heads=16, ffn=4096, vocab=51200, mlp="gelu", tied=True)


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


def limits(memory: float) -> StageLimits:
    return StageLimits(memory, TensorBytes().state, 0.0, lambda operators, parameters: operators)


@pytest.mark.parametrize("rate", [1e9, 1e11])
@pytest.mark.parametrize("ranks", [1, 4])
def test_a_line_is_what_the_search_of_each_stage_finds(rate: float, ranks: int) -> None:
    machine = ideal_machine(1e14, rate, 1e-5, 1e12)
    pricing = GraphPricing(logical_mesh(ranks, machine), machine, TensorBytes())
    choices, costs = (
        StageChoices(SHAPE, 8, 512, pricing),
        StageCosts(SHAPE, 8, 512, lambda _: pricing),
    )
    for start, stop in ((0, 1), (0, 5), (3, 9), (2, 12), (0, 12)):
        own = choices.of(start == 0, stop == 12)
        found = stage_seconds(own, 12, 3, limits(np.inf)).seconds[2, stop - start]
        assert found == pytest.approx(costs.cost(start, stop, ranks).seconds, rel=1e-9)


def test_less_memory_recomputes_more_layers_and_takes_longer() -> None:
    machine = ideal_machine(1e14, 1e10, 1e-5, 1e12)
    pricing = GraphPricing(logical_mesh(2, machine), machine, TensorBytes())
    choices = StageChoices(SHAPE, 8, 512, pricing).of(False, False)
    seconds, recomputed = [], []
    for gib in (64, 5, 4, 3, 0.1):
        found = stage_seconds(choices, 8, 4, limits(gib * 2**30))
        seconds.append(float(found.seconds[3, 8]))
        recomputed.append(int(found.recomputed[3, 8]))
    assert seconds == sorted(seconds) and np.isinf(seconds[-1]) and np.isfinite(seconds[-2])
    assert recomputed[0] == 0 < recomputed[2] <= recomputed[3]


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


def test_a_mixture_of_experts_is_refused(ask: Ask) -> None:
    words = ["--model", "mixtral-8x7b", "--gpu", "h100-sxm-80gb", "--gpus", 8]
    code, _, err = ask("search", *words, "--space", "operators", "--json")
    assert code == 2 and "--space: is 'operators', and mixtral-8x7b has model.moe" in err


def test_a_found_pipeline_equals_one_device() -> None:
    start = plan(1, 1, 4, shape=LLAMA, layers=2)
    where = ["strategy.pipeline.size=2", "strategy.tensor.size=2"]
    found = search(start, space="operators", where=where, top=1).top[0].plan
    answer = verify(found, "fp64")
    assert answer["passed"] and found.strategy.operators, answer
