"""Reasons: sentences that carry the estimate's own numbers, changes that do what they say, lists
that are in order.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from workbench.errors import PlanError
from workbench.plan.rank_placement import leaves_node
from workbench.plan.schema import Plan
from workbench.planner import estimate
from workbench.planner.explain import ChangeEffect, explain, neighbours, sensitivity, why
from workbench.planner.explain.bottlenecks import find_bottleneck
from workbench.planner.explain.explanation import EFFECT_HEADS, effect_cells
from workbench.planner.explain.plan_figures import plan_figures
from workbench.planner.search.search_space import search_space
from workbench.units import seconds_text

CARD = "h100-sxm-80gb"


def on(model: str, gpus: int, strategy: str, gpu: str = CARD, /, **sets: Any) -> Plan:
    return Plan.of(model, gpu=gpu, gpus=gpus, strategy=strategy, set=sets)


@pytest.fixture(scope="module")
def megatron() -> Plan:
    return on("llama-3-8b", 16, "megatron-3d")


@pytest.fixture(scope="module")
def unfit() -> Plan:
    return on("llama-3-8b", 16, "ddp", "v100-sxm2-32gb")


def named(effects: list[ChangeEffect], start: str) -> ChangeEffect:
    return next(effect for effect in effects if effect.name.startswith(start))


# ---- what binds ----------------------------------------------------------------------------------
def test_a_plan_that_does_not_fit_is_bound_by_memory_and_the_sentence_has_the_estimates_numbers(
    unfit: Plan,
) -> None:
    found, profile = why(unfit), estimate(unfit)
    assert found.bottleneck.constraint == "memory" and found.sentence == found.bottleneck.memory
    peak = max(profile.peak_bytes_by_rank.values())
    assert f"{peak / 2**30:,.1f} GiB" in found.sentence and "too much" in found.sentence
    rows = profile.memory[(profile.memory.moment == "peak") & (profile.memory["rank"] == 0)]
    largest = rows.sort_values("bytes").iloc[-1]
    assert (
        f"largest category is {largest.category}, {largest.bytes / 2**30:,.1f} GiB"
        in found.sentence
    )


def test_a_plan_that_fits_is_bound_by_the_largest_part_of_its_step(megatron: Plan) -> None:
    found, parts = why(megatron), estimate(megatron).notes["time"]
    assert found.bottleneck.constraint == max(parts, key=parts.get) and found.fixes == ()
    share = parts[found.bottleneck.constraint] / sum(parts.values())
    assert f"({100 * share:.0f} %)" in found.sentence and "(estimated)" in found.sentence


@pytest.mark.parametrize(
    ("nodes", "words"), [(1, "links inside a node, 450"), (2, "network between nodes, 400")]
)
def test_communication_is_told_with_the_link_that_it_rides(nodes: int, words: str) -> None:
    more = {"strategy.tensor.size": 8 * nodes, "training.micro_batch": 8}  # no idle GPU hides it
    plan = on("llama-3-8b", 16, "megatron-tp", **more)
    profile = estimate(plan)
    assert profile.notes["time"]["tensor_comm"] > 0.05 * sum(profile.notes["time"].values())
    assert words in find_bottleneck(plan.resolve(), profile).time


def test_a_group_crosses_nodes_where_its_ranks_span_more_than_one() -> None:
    full = on(
        "llama-3-8b", 32, "megatron-3d", **{"strategy.tensor.size": 8, "strategy.pipeline.size": 2}
    ).resolve()
    assert [
        axis for axis in ("tensor", "context", "data", "pipeline") if leaves_node(full, axis)
    ] == ["data", "pipeline"]


def test_sentences_are_as_practitioners_say_them() -> None:
    found = explain(on("llama-3-8b", 64, "dapple", **{"training.global_batch": 1024}))
    words = " ".join((found.step_line, repr(found)))
    low, high = found.interval
    assert f"90 % interval {seconds_text(low)} to {seconds_text(high)}" in words
    assert re.search(r"MFU [\d.]+ % in compute, [\d.]+ % overall", words)
    assert re.search(r"161 B tokens \(Chinchilla, 20/param\)", words)
    assert "of the ideal" not in words and "while it lasts" not in words


def test_a_bubble_is_told_by_its_formula() -> None:
    plan = on("llama-3-8b", 8, "dapple", **{"training.global_batch": 8})
    assert "(stages - 1) / microbatches = 7 / 8" in why(plan).bottleneck.time


def test_a_card_almost_full_is_told() -> None:
    plan = on("llama-3-8b", 64, "zero-3")
    peak = plan_figures(plan.resolve()).peak_bytes / 2**30
    near = plan.replace(**{"cluster.gpu.memory_gib": peak / 0.95})
    assert (
        "near the limit" in why(near).bottleneck.memory
        and "near the limit" not in why(plan).bottleneck.memory
    )


# ---- what makes it fit ---------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("model", "gpus"), [("llama-3-8b", 16), ("llama-3-70b", 64), ("gpt-1t", 8)]
)
def test_every_fix_fits_and_does_what_it_says(model: str, gpus: int) -> None:
    plan = on(model, gpus, "ddp", "v100-sxm2-32gb", **{"strategy.precision": "fp16"})
    fixes = why(plan).fixes
    assert 0 < len(fixes) <= 6
    for fix in fixes:
        changed = estimate(plan.replace(**fix.changes))
        assert changed.fits is True and fix.after.fits
        assert max(changed.peak_bytes_by_rank.values()) == pytest.approx(
            fix.after.peak_bytes, rel=1e-6
        )
        assert changed.step_seconds == pytest.approx(fix.after.seconds, rel=1e-6)


def test_fixes_on_the_same_cards_come_first_and_the_fastest_of_them_leads(unfit: Plan) -> None:
    fixes = why(unfit).fixes
    same = [fix for fix in fixes if not {"cluster.gpu", "cluster.gpus"} & set(fix.changes)]
    assert len(same) > 1 and list(fixes[: len(same)]) == same
    assert len({tuple(fix.changes) for fix in fixes}) == len(fixes)


@pytest.mark.parametrize("risk", [0.001, 0.05, 0.3])
def test_what_fits_is_what_a_search_with_that_risk_would_offer(risk: float) -> None:
    plan = on("llama-3-8b", 64, "zero-3", **{"training.micro_batch": 4})
    most = replace(search_space(plan), risk=risk).largest_peak_bytes
    found = explain(plan, risk=risk)
    for effect in (*found.sensitivity, *found.neighbours):
        host = not effect.after.exceeds_host
        assert effect.after.fits == (effect.after.peak_bytes <= most and host), effect.name
        assert effect.to_json()["probability_of_running_out"] == effect.after.runs_out
    zero = named(found.neighbours, "ZeRO 3 → 2")
    cells = dict(zip(EFFECT_HEADS, effect_cells(zero)))
    assert cells["OOM risk"] == "10 %" and cells["fits"] == ("yes" if risk == 0.3 else "at risk")
    with pytest.raises(PlanError, match=r"--risk: is 1\.5; legal: a probability"):
        explain(plan, risk=1.5)


def test_a_plan_at_risk_is_told_what_fits_within_it() -> None:
    plan = on("llama-3-8b", 64, "zero-2", **{"training.micro_batch": 4})
    near = explain(plan)
    assert not near.figures.fits and "out-of-memory risk 10 %" in near.sentences[0]
    assert near.reasons.fixes and all(fix.after.fits for fix in near.reasons.fixes)
    assert explain(plan, risk=0.2).figures.fits


# ---- what changes it -----------------------------------------------------------------------------
def test_sensitivity_equals_an_estimate_of_the_changed_plan(megatron: Plan) -> None:
    found = sensitivity(megatron)
    assert len(found) >= 6
    for effect in found:
        changed = estimate(megatron.replace(**effect.changes))
        assert changed.step_seconds == pytest.approx(effect.after.seconds, rel=1e-9), effect.name


def test_twice_of_a_rate_changes_what_rides_on_it(megatron: Plan) -> None:
    found = sensitivity(megatron)
    parts = estimate(megatron).notes["time"]
    flops = named(found, "twice the FLOP/s")
    assert (
        -parts["compute"] / 2 - parts["bubble"] <= flops.seconds_change < 0
        and flops.peak_change == 0
    )
    assert named(found, "twice the link").seconds_change < -0.3 * parts["tensor_comm"]
    assert named(found, "twice the memory bandwidth").seconds_change < 0
    assert (
        named(found, "twice the sequence").after.tokens
        == 2 * megatron.resolve().training.global_batch * 2048
    )


def test_eight_more_gpus_or_the_nearest_legal_number() -> None:
    assert named(sensitivity(on("llama-3-8b", 64, "zero-3")), "8 more GPUs").after.gpus == 72
    wide = on(
        "llama-3-8b", 64, "megatron-3d", **{"strategy.tensor.size": 8, "strategy.pipeline.size": 4}
    )
    assert named(sensitivity(wide), "32 more GPUs, the nearest").after.gpus == 96


def test_the_network_matters_only_beyond_a_node() -> None:
    one, two = (sensitivity(on("llama-3-8b", gpus, "zero-3")) for gpus in (8, 64))
    assert (
        named(one, "twice the network").seconds_change
        == 0
        > named(two, "twice the network").seconds_change
    )


def test_neighbours_differ_in_one_knob_and_equal_an_estimate_of_their_own(megatron: Plan) -> None:
    here = megatron.resolve()
    for effect in neighbours(megatron):
        changed = megatron.replace(**effect.changes)
        profile, full = estimate(changed), changed.resolve()
        assert profile.step_seconds == pytest.approx(effect.after.seconds, rel=1e-9), effect.name
        axes = [
            axis
            for axis in ("tensor", "context", "pipeline")
            if full.sizes[axis] != here.sizes[axis]
        ]
        assert len(axes) == int(effect.name.split()[0] in ("tensor", "context", "pipeline")), (
            effect.name
        )
        assert (
            full.training.global_batch == here.training.global_batch
            and full.world_size == here.world_size
        )


def test_neighbours_that_fit_come_first_and_the_fastest_lead(megatron: Plan) -> None:
    found = neighbours(megatron)
    order = [(not effect.after.fits, effect.after.seconds) for effect in found]
    assert order == sorted(order)
    knobs = {re.split(r" (?=\S+ →)", effect.name)[0] for effect in found}
    assert {"tensor", "pipeline", "micro-batch", "ZeRO", "recompute", "sequence parallel"} <= knobs


def test_kernels_are_no_step_from_the_plan_but_what_else_could_be_installed(megatron: Plan) -> None:
    assert not any("strategy.kernels" in effect.changes for effect in neighbours(megatron))
    other = named(sensitivity(megatron.replace(**{"strategy.kernels": "eager"})), "fused kernels")
    assert other.after == plan_figures(megatron.replace(**{"strategy.kernels": "fused"}).resolve())
    assert other.after.seconds < other.before.seconds


def test_a_complete_plan_has_the_same_neighbours(megatron: Plan) -> None:
    plan = megatron.replace(
        **{"strategy.gradient_dtype": "fp32"}
    )  # `auto` would follow a change of ZeRO
    short, complete = (
        {e.name: e.after.seconds for e in neighbours(p)} for p in (plan, plan.resolve())
    )
    assert complete == pytest.approx(short)


def test_experts_are_a_knob_of_a_mixture() -> None:
    assert any(
        effect.name.startswith("expert")
        for effect in neighbours(on("mixtral-8x7b", 16, "expert-parallel"))
    )


# ---- all of it -----------------------------------------------------------------------------------
def test_an_explanation_is_one_json_object_a_page_and_a_text(unfit: Plan) -> None:
    found = explain(unfit, tokens=1e9, price=2.0)
    data = json.loads(json.dumps(found.to_json()))
    assert (
        data["source"] == "estimated" and data["fits"] is False and data["cost"]["tokens"] == 10**9
    )
    assert set(data["reasons"]) == {"constraint", "sentence", "memory", "time", "fixes", "cannot"}
    assert (
        data["neighbours"][0]["changes"] and data["sensitivity"][0]["seconds_relative"] is not None
    )
    page, text = found._repr_html_(), repr(found)
    for told in (page, text):
        assert (
            "What makes it fit (estimated)" in told and "Neighbours" in told and "Memory:" in told
        )
    assert page.count("<tr>") == sum(len(rows) + 1 for _, rows in found.tables())


def test_markup_in_a_name_is_text(megatron: Plan) -> None:
    assert "<script>" not in explain(megatron.replace(name="<script>"))._repr_html_()


def test_an_explanation_asks_for_one_whole_estimate(
    megatron: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def counted(plan: Plan) -> Any:
        calls.append(plan)
        return estimate(plan)

    monkeypatch.setattr("workbench.planner.explain.plan_figures.estimate", counted)
    explain(megatron)
    assert calls == [megatron]


def test_the_old_name_of_the_bottleneck_is_read_with_a_warning(unfit: Plan) -> None:
    found = why(unfit)
    with pytest.warns(DeprecationWarning, match="binding is now bottleneck"):
        assert found.binding is found.bottleneck
