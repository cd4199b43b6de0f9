"""Search: a candidate is what `estimate` says of its plan, nothing better is overlooked, emptiness
has a reason.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from workbench.costmodel.communication.packed_buckets import rank_buckets
from workbench.costmodel.inputs.rank_workload import Workload, workload
from workbench.costmodel.memory import near_full
from workbench.costmodel.memory.near_full import near_full_slowdown
from workbench.costmodel.memory.peak_memory import peak_memory
from workbench.errors import PlanError
from workbench.plan.catalog.catalog import models
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.rules.legal_sizes import exceeds, grids
from workbench.plan.schema import Plan
from workbench.planner import estimate
from workbench.planner.calibrated_plan import with_calibration
from workbench.planner.explain.plan_figures import plan_figures
from workbench.planner.operator_plans.planned_workload import planned_workload
from workbench.planner.search import search
from workbench.planner.search.cell_evaluation import CellEvaluator
from workbench.planner.search.cells import search_cells
from workbench.planner.search.constraints import narrow_space, parse_constraint
from workbench.planner.search.results import result_tables
from workbench.planner.search.search_space import SearchSpace, candidate_plan, search_space
from workbench.units import interval_text, seconds_text


@pytest.fixture(autouse=True)
def slow_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retries that cost enough to change ranks, whatever was fitted."""
    monkeypatch.setattr(near_full, "retry_slowdown", lambda: 4.0)


def of(model: str = "gpt3-175b", gpus: int = 512, /, **changes: Any) -> Plan:
    plan = Plan.model_validate({"model": model, "cluster": {"gpu": "a100-sxm-80gb", "gpus": gpus}})
    return plan.replace(**{"training.global_batch": 3 * gpus, **changes})


def legal_ones(space: SearchSpace) -> list[tuple[Any, int, float, float]]:
    """(cell, number, seconds, peak) of every distinct legal candidate; with tiles of those only
    that do not fit with fewer.
    """
    evaluator, found = CellEvaluator.of(space), []
    for cell in search_cells(space):
        e = evaluator(cell, cell.grid())
        legal = np.broadcast_to(e.legal, e.shape)
        for tiles in (n for n in space.tile_factor if n < cell.fixed.tile_factor):
            fewer = evaluator.memory(cell.with_tiles(tiles), cell.grid())
            legal = legal & ~fewer.fitting(space.largest_peak_bytes)
        numbers = np.flatnonzero(legal)
        found += list(
            zip([cell] * len(numbers), numbers, e.at(e.seconds, numbers), e.at(e.peak, numbers))
        )
    return found


def agree_on_memory(full: ResolvedPlan, searched: float, estimated: float) -> None:
    """A search counts what the closed form does of a plan, and an estimate beside it what pads
    buckets to equal shards.
    """
    full, constants = with_calibration(full)
    alike = float(peak_memory(workload(full), constants).peak.max())
    assert alike == pytest.approx(searched, rel=1e-9, abs=32)
    assert abs(estimated - searched) <= 32 + 1e-9 * searched + padding_bytes(planned_workload(full))


def padding_bytes(w: Workload) -> int:
    """Most that a search leaves out: less than 64 elements of each shard of a bucket, their
    parameters, gradients, moments and master weights.
    """
    if w.in_buckets is None:
        return 0
    buckets = [b for place in w.places for stage in rank_buckets(w, place.stage) for b in stage]
    return sum(b.shards for b in buckets if b.shards > 1) * 64 * (4 + 4 + 8 + 4)


@pytest.mark.drawn(4)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("plan", "where"),
    [
        (of(), ["strategy.pipeline.size in 1,8", "strategy.data.reduce=step"]),
        (
            of("llama-3-8b", 32, **{"training.sequence_length": 32768}),
            ["strategy.data.overlap=true"],
        ),
        (of("mixtral-8x7b", 32), ["strategy.data.overlap=true"]),
        (
            of("gpt2-xl", 24, **{"training.sequence_length": 1024}),
            ["strategy.tensor.size in 2,4", "strategy.pipeline.schedule in 1f1b,zb-v"],
        ),
    ],
    ids=["dense", "long", "mixture", "uneven"],
)
def test_a_candidate_is_what_estimate_says_of_its_plan(
    plan: Plan, where: list[str], seed: int
) -> None:
    space = narrow_space(search_space(plan, "wide"), map(parse_constraint, where))
    evaluator, draw = CellEvaluator.of(space), random.Random(seed)
    for cell in draw.sample(list(search_cells(space)), 10):
        e = evaluator(cell, cell.grid())
        legal = np.flatnonzero(np.broadcast_to(e.legal, e.shape)).tolist()
        numbers = np.array(draw.sample(legal, min(2, len(legal))), dtype=int)
        for number, seconds, peak in zip(numbers, e.at(e.seconds, numbers), e.at(e.peak, numbers)):
            own = candidate_plan(space, cell.choice(number))
            found = estimate(own)
            assert found.step_seconds == pytest.approx(seconds, rel=1e-9)
            agree_on_memory(own.resolve(), peak, max(found.peak_bytes_by_rank.values()))


@pytest.mark.parametrize("model", sorted(models()))
@pytest.mark.parametrize("kind", ["default", "vast"])
def test_every_tensor_size_of_the_space_is_legal(model: str, kind: str) -> None:
    plan = Plan.model_validate({"model": model, "cluster": {"gpu": "h100-sxm-80gb", "gpus": 48}})
    sizes = [size for size in search_space(plan, kind).tensor if isinstance(size, int)]
    for size in sizes:
        assert not exceeds(plan.resolve().shape, size)
        found = plan.replace(
            **{"strategy.tensor.size": size, "training.global_batch": 48}
        ).resolve()
        assert found.strategy.tensor.size == size


def test_sizes_that_pad_little_are_tried_and_those_that_pad_much_are_not() -> None:
    assert search_space(of("gpt2-xl", 16, **{"training.sequence_length": 1024})).tensor == (
        1,
        2,
        4,
        8,
    )  # 25 heads
    assert (
        64 not in search_space(of("gpt3-175b", 512), "wide").tensor
    )  # of 96 heads the widest rank would have 2


@pytest.mark.parametrize(
    ("model", "stack"),
    [("llama-3-8b", "workbench"), ("llama-3-8b", "textbook"), ("deepseek-v3", "workbench")],
)
@pytest.mark.parametrize("algorithm", ["1d", "2d", "2.5d", "3d"])
def test_so_is_one_of_any_kernels_and_on_any_tensor_grid(
    model: str, stack: str, algorithm: str
) -> None:
    plan = of(model, 64, **{"strategy.stack": stack})
    space = narrow_space(
        search_space(plan, "vast"),
        map(parse_constraint, (*FEW, f"strategy.tensor.algorithm={algorithm}")),
    )
    draw, every = random.Random(2), legal_ones(space)
    kinds = ("eager", "compiled", "fused")
    drawn = {
        kind: draw.sample([one for one in every if one[0].fixed.kernels == kind], 4)
        for kind in kinds
    }
    for kind, (cell, number, seconds, peak) in (
        (kind, one) for kind, ones in drawn.items() for one in ones
    ):
        full = candidate_plan(space, cell.choice(number)).resolve()
        assert full.strategy.tensor.algorithm == algorithm and isinstance(
            full.strategy.tensor.size, int
        ) == (algorithm == "1d")
        found = plan_figures(full)
        assert found.seconds == pytest.approx(seconds, rel=1e-9)
        agree_on_memory(full, peak, found.peak_bytes)
        assert full.strategy.kernels == kind
    assert {cell.fixed.kernels for cell, *_ in every} == set(kinds)


FEW = (
    "strategy.data.bucket_mib=25",
    "strategy.gradient_dtype=parameters",
    "strategy.recompute in none,selective",
    "strategy.data.reduce=step",
    "strategy.data.overlap=true",
    "strategy.pipeline.schedule in 1f1b,zb-v",
    "strategy.pipeline.size in 1,4",
    "strategy.placement=[tensor, context, data, pipeline]",
)


def test_the_largest_space_holds_every_legal_grid() -> None:
    space = narrow_space(
        search_space(of("llama-3-8b", 64), "vast"),
        map(parse_constraint, (*FEW, "strategy.tensor.algorithm!=1d")),
    )
    shape = space.base.shape
    every = {
        (name, tuple(grid)) for name in ("2d", "2.5d", "3d") for grid in grids(name, 64, shape)
    }
    same = {(name, grid) for name, grid in every if grid[0] == 1 or grid[2:] == (1,)}
    found = {
        (cell.fixed.algorithm, tuple(split.size(cell.fixed.algorithm)))
        for cell in search_cells(space)
        for split in cell.values["split"]
    }
    assert found == every - same


def test_a_search_keeps_the_kernels_that_were_written_unless_it_varies_them() -> None:
    plan = of("llama-3-8b", 8, **{"strategy.kernels": "compiled"})
    where = [
        "strategy.tensor.size=1",
        "strategy.pipeline.size=1",
        "training.micro_batch=1",
        "strategy.recompute=full",
    ]
    for space, kernels in (("default", {"compiled"}), ("vast", {"eager", "compiled", "fused"})):
        found = search(plan, space=space, top=200, where=where)
        assert {one.plan.resolve().strategy.kernels for one in found.top} == kernels


@pytest.mark.parametrize(
    "written",
    [
        {"attention": "math"},
        {"kernels": "fused", "loss": "fused_linear"},
        {"stack": "fsdp", "attention": "flash-3", "kernels": "liger", "loss": "fused_linear"},
    ],
)
def test_a_search_keeps_what_runs_attention_and_the_loss(written: dict[str, str]) -> None:
    fields = {f"strategy.{name}": value for name, value in written.items()}
    plan = of("llama-3-8b", 16, **fields, **{"training.sequence_length": 16384})
    kept = written if "stack" in written else {k: v for k, v in written.items() if k != "loss"}
    found = search(plan, top=5).top
    assert found
    for one in found:
        strategy = one.plan.resolve().strategy
        assert {name: getattr(strategy, name) for name in kept} == kept


@pytest.mark.parametrize("model", ["opt-13b", "llama-2-13b"])
def test_on_one_gpu_parameters_in_host_memory_are_a_plan_too(model: str) -> None:
    plan = Plan.model_validate({"model": model, "cluster": {"gpu": "v100-sxm2-32gb", "gpus": 1}})
    asked = plan.replace(**{"training.sequence_length": 1024, "strategy.precision": "fp16"})
    found = search(asked, risk=0.5)
    assert (
        found.feasible and not found.empty
    )  # 13e9 parameters of 2 bytes alone are 24 of its 32 GiB
    best = found.top[0].plan.resolve()
    assert (best.strategy.data.zero, best.strategy.data.offload, best.gpu.name) == (
        3,
        "parameters",
        "v100-sxm2-32gb",
    )
    assert estimate(best).fits


def test_what_was_found_is_told_without_completing_its_plans_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = search(of("llama-3-8b", 16), top=3)

    def refused(_: Plan) -> None:
        raise AssertionError("completed again")

    monkeypatch.setattr(Plan, "complete", refused)
    assert found.to_json()["top"][0]["strategy"] in repr(found)


@pytest.mark.slow
def test_candidates_are_distinct_plans() -> None:
    plan = of("llama-3-8b", 16)
    few = ["strategy.recompute=none", "strategy.data.zero in 0,3", "strategy.data.bucket_mib=25"]
    space = narrow_space(search_space(plan, "vast"), map(parse_constraint, few))
    drawn = random.Random(1).sample(legal_ones(space), 300)
    plans = {
        candidate_plan(space, cell.choice(number)).resolve().model_dump_json()
        for cell, number, *_ in drawn
    }
    assert len(plans) == 300


@pytest.mark.slow
@pytest.mark.parametrize(
    ("objective", "kind"),
    [("time", "default"), ("cost", "default"), ("gpus", "default"), ("time", "vast")],
)
def test_brute_force_finds_the_same(objective: str, kind: str) -> None:
    plan = of("llama-3-8b", 8)
    where = [
        "strategy.tensor.size<=2",
        "strategy.recompute in none,full",
        "training.micro_batch<=2",
        "strategy.data.zero in 0,3",
        "strategy.data.offload=none",
        "strategy.pipeline.schedule=1f1b",
    ]
    if kind == "vast":
        where = [
            *FEW,
            "strategy.tensor.size in 1,[2,2],[2,2,2]",
            "strategy.kernels!=compiled",
            where[3],
            where[4],
            "training.micro_batch in 2,4",
            "strategy.data.keep_gathered=false",
        ]
    found = search(plan, objective, space=kind, where=where)
    worlds = (8,) if objective == "time" else (8, 4, 2, 1)
    space = narrow_space(search_space(plan, kind, worlds), map(parse_constraint, where))
    rows = []
    for cell, number, *_ in legal_ones(space):
        profile = estimate(candidate_plan(space, cell.choice(number)))
        slower = profile.notes["memory"]["expected_slowdown"]  # none where it does not fit
        expected = profile.step_seconds * (slower or 1.0)
        score = {"time": 1, "cost": profile.world_size, "gpus": 0}[objective] * expected
        rows.append((profile.world_size if objective == "gpus" else 0, score, expected, profile))
    assert len(rows) == found.candidates
    fitting = sorted(
        row[:3] for row in rows if row[3].notes["memory"]["probability_of_running_out"] <= 0.05
    )
    assert len(fitting) == found.feasible
    assert [one.expected_seconds for one in found.top] == pytest.approx(
        [row[2] for row in fitting[:10]], rel=1e-5
    )


def test_no_candidate_beats_the_front() -> None:
    plan = of("llama-3-8b", 16)
    found = search(plan, top=1)
    front = [(one.expected_seconds, one.peak_bytes) for one in found.pareto]
    assert front == sorted(front) and len(front) > 3
    space = search_space(plan)
    k = with_calibration(space.base)[1]
    for _, _, seconds, peak in legal_ones(space):
        if peak <= space.largest_peak_bytes:
            slow = near_full_slowdown(peak, 79.3 * 2**30, space.base.strategy.stack, k)
            assert any(s <= seconds * slow * (1 + 1e-5) and p <= peak for s, p in front)
    assert found.top[0].expected_seconds == front[0][0]


def test_what_a_full_gpu_slows_down_is_in_the_rank_and_in_the_estimate() -> None:
    plan = of("llama-2-13b", 8)
    found = search(plan, risk=0.3, top=1000)
    fastest = min(found.top, key=lambda one: one.seconds)
    assert fastest.slowdown > 1.2 and found.top[0].slowdown < 1.1
    assert found.top[0].expected_seconds < fastest.expected_seconds
    for one in (fastest, found.top[0]):
        notes = estimate(one.plan).notes["memory"]
        assert notes["expected_slowdown"] == pytest.approx(one.slowdown)
        assert one.to_json()["expected_seconds"] == one.seconds * one.slowdown
    slow = search(
        plan, risk=0.3, top=1, where=[f"expected_seconds>{1.001 * fastest.expected_seconds}"]
    )
    assert slow.top[0].expected_seconds > fastest.expected_seconds


def test_riskier_plans_are_found_where_they_are_allowed() -> None:
    plan = of("llama-2-13b", 8)
    each = {risk: search(plan, risk=risk, top=1000) for risk in (0.01, 0.05, 0.5)}
    assert each[0.01].feasible < each[0.05].feasible < each[0.5].feasible
    for risk, found in each.items():
        assert max(one.risk or 0.0 for one in found.top) <= risk + 1e-9
        assert all(
            one.risk
            == pytest.approx(estimate(one.plan).notes["memory"]["probability_of_running_out"])
            for one in found.top[:2]
        )
    best = [each[risk].top[0].expected_seconds for risk in (0.5, 0.05, 0.01)]
    assert best == sorted(best)


@pytest.mark.parametrize("risk", [0.0, 1.0, -1.0, float("nan")])
def test_a_risk_is_a_probability(risk: float) -> None:
    with pytest.raises(PlanError, match=r"--risk.*legal: a probability above 0 and below 1"):
        search(of("gpt2-xl", 8), risk=risk)


@pytest.mark.parametrize(
    ("model", "gpus", "where", "said"),
    [
        ("gpt3-175b", 1, [], "no plan fits a100-sxm-80gb"),
        ("llama-3-8b", 8, ["peak_gib<1"], "no plan meets 'peak_gib<1'; without it"),
        ("llama-3-8b", 8, ["seconds<2", "strategy.tensor.size=3"], "without it"),
    ],
)
def test_an_empty_search_says_why(model: str, gpus: int, where: list[str], said: str) -> None:
    found = search(of(model, gpus), where=where)
    assert not found.top and found.feasible == 0
    assert said in found.empty


@pytest.mark.parametrize(
    ("words", "field"),
    [
        ({"objective": "joy"}, "--objective"),
        ({"space": "huge"}, "--space"),
        ({"top": 0}, "--top"),
        ({"where": ["tensor ~ 3"]}, "--where"),
        ({"where": ["training.steps<3"]}, "--where"),
        ({"deadline_days": 3.0}, "--deadline"),
        ({"deadline_days": float("nan"), "tokens": 1e9}, "--deadline"),
    ],
)
def test_words_that_mean_nothing_are_refused(words: dict[str, Any], field: str) -> None:
    with pytest.raises(PlanError) as error:
        search(of("tiny", 8), **words)
    assert [problem.field for problem in error.value.problems] == [field]


@pytest.mark.parametrize(
    ("model", "gpu", "gpus", "batch"),
    [("gpt3-175b", "a100-sxm-80gb", 1024, 1536), ("llama-3.1-405b", "h100-sxm-80gb", 16384, 2048)],
)
def test_a_batch_that_pure_data_parallelism_does_not_divide_is_searched(
    model: str, gpu: str, gpus: int, batch: int
) -> None:
    fields = {
        "model": model,
        "cluster": {"gpu": gpu, "gpus": gpus},
        "training": {"global_batch": batch},
    }
    best = search(Plan.model_validate(fields), top=1).top[0]
    assert best.plan.training.global_batch == batch and batch % gpus
    assert best.seconds == pytest.approx(estimate(best.plan).step_seconds)


def test_a_missed_deadline_says_the_days_and_how_many_gpus_would_do() -> None:
    plan = of("gpt2-xl", 16, **{"training.global_batch": 1024})
    fastest = search(plan, top=1, tokens=1e12)
    days = fastest.bill(fastest.top[0])["days"]
    missed = search(plan, top=1, tokens=1e12, deadline_days=0.6 * days)
    assert (
        not missed.top
        and f"it needs {days:,.3g} days for 1e+12 tokens; 32 GPUs would do, in " in missed.empty
    )
    never = search(plan, top=1, tokens=1e12, deadline_days=1e-4 * days)
    assert "32 times the GPUs would not do either" in never.empty


def test_tokens_give_days_and_cost_and_a_reason_for_fewer_gpus() -> None:
    found = search(of("gpt2-xl", 64), "cost", top=2, tokens=1e12)
    first, row = found.top[0], result_tables.table_row(found, found.top[0])
    assert result_tables.table_heads(found)[8:10] == ("time", "cost") and len(row) == len(
        result_tables.table_heads(found)
    )
    bill, price = found.bill(first), found.price_per_hour
    assert bill["dollars"] == pytest.approx(bill["days"] * 24 * first.plan.world_size * price)
    assert row[9] == f"${bill['dollars']:,.0f}" and "days" in found.to_json()["top"][0]
    used = first.plan.world_size
    assert used < 64 and f"The first uses {used} of 64 GPUs" in result_tables.search_text(found)
    assert all(len(plans) <= 2 for _, plans in result_tables.search_tables(found))


def test_times_of_a_candidate_are_written_as_everywhere_else() -> None:
    found = search(of("gpt2-xl", 8), top=1).top[0]
    slow = replace(found, seconds=130.0, slowdown=1.0)
    slow.__dict__["interval"] = (7.0, 5400.0)  # where the cached property keeps it
    cells = dict(zip(result_tables.CANDIDATE_HEADS, result_tables.candidate_cells(slow)))
    assert cells["step time"] == seconds_text(130.0) == "2 min 10 s"
    assert cells["90 % interval"] == interval_text((7.0, 5400.0)) == "7.00 s to 1 h 30 min"


def test_a_deadline_keeps_what_is_fast_enough() -> None:
    plan = of("llama-3-8b", 64)
    free = search(plan, "cost", top=1)
    tokens = 1e12
    slow = (
        free.top[0].expected_seconds
        * tokens
        / (free.top[0].plan.training.global_batch * 2048)
        / 86400
    )
    kept = search(plan, "cost", top=1, deadline_days=slow / 2, tokens=tokens)
    assert kept.top[0].expected_seconds <= free.top[0].expected_seconds / 2
    assert kept.top[0].score >= free.top[0].score


@pytest.mark.parametrize("gpu", ["a100-sxm-80gb", "a100-sxm-40gb"])
def test_splits_of_which_nothing_fits_are_left_out_and_nothing_else_is(gpu: str) -> None:
    plan = of("llama-2-13b", 16, **{"cluster.gpu": gpu})
    space = search_space(plan, "wide")
    evaluator, most, cut = CellEvaluator.of(space), space.largest_peak_bytes, 0
    for cell in list(search_cells(space))[::5]:
        held = evaluator.memory(cell, cell.grid())
        fits = np.broadcast_to(held.legal & (held.peak <= most), held.shape)
        less = held.with_fitting_splits(held.legal & (held.peak <= most))
        kept = np.broadcast_to(less.legal & (less.peak <= most), less.shape)
        whole, part = evaluator.times(held), evaluator.times(less)
        every, some = np.flatnonzero(fits), np.flatnonzero(kept)
        assert np.array_equal(whole.at(whole.peak, every), part.at(part.peak, some))
        assert np.array_equal(whole.at(whole.seconds, every), part.at(part.seconds, some))
        assert [cell.choice(n) for n in every[:5]] == [less.cell.choice(n) for n in some[:5]]
        cut += len(less.cell.values["split"]) < len(cell.values["split"])
    assert cut


def test_a_plan_is_simulated_when_somebody_asks() -> None:
    first = search(of("llama-3-8b", 16), top=1, where=["strategy.pipeline.size=4"]).top[0]
    alone = estimate(first.plan).notes["simulated_step_seconds"]
    assert first.simulated == pytest.approx(alone) == first.to_json()["simulated_seconds"]


def test_no_step_time_stands_without_its_interval() -> None:
    """The interval that `estimate` gives the same plan, in the table, the text and the JSON."""
    found = search(of("gpt2-xl", 64), top=2)
    for one, written in zip(found.top, found.to_json()["top"]):
        assert one.interval is not None
        assert list(one.interval) == written["step_seconds_90"]
        assert list(one.interval) == pytest.approx(estimate(one.plan).notes["step_seconds_90"])
        low, high = one.interval
        assert low < one.seconds < high
        assert interval_text((low, high)) in repr(found)
    for one in found.pareto:
        assert one.interval is not None
        assert one.interval[0] < one.seconds < one.interval[1]


def test_cells_that_share_sizes_hold_and_take_what_each_does_alone() -> None:
    space = search_space(of("llama-2-13b", 16), "vast")
    together, most = CellEvaluator.of(space), space.largest_peak_bytes
    shared = 0
    for cell in list(search_cells(space))[:: len(space.kernels) * 7]:
        former = None
        for kernels in space.kernels:
            other = replace(
                cell,
                fixed=replace(cell.fixed, kernels=kernels),
                values=cell.values | {"kernels": (kernels,)},
            )
            found = []
            for evaluator in (together, replace(together, _former=[])):
                held = evaluator.memory(other, other.grid())
                held = held.with_fitting_splits(held.legal & (held.peak <= most))
                found.append(evaluator.times(held))
            one, alone = found
            shared += former is not None and one.legal is former.legal
            former = one
            for name in ("legal", "peak", "seconds", "compute"):
                assert np.array_equal(getattr(one, name), getattr(alone, name))
    assert shared
