"""Operator strategies are priced by the cost model: calibration, framework, nodes and racks."""

from pathlib import Path
from typing import Any

import pytest

from tests.costmodel import test_calibrated as calibration
from workbench.costmodel.communication.collective_cost import collective_seconds
from workbench.costmodel.rates.constants import constants
from workbench.machine import calibration_file
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.schema import Plan
from workbench.planner.autoshard import choose_for_plan
from workbench.planner.autoshard.for_plans.plan_machine import machine_model
from workbench.planner.autoshard.plan_problem import tensor_bytes
from workbench.planner.calibrated_plan import with_calibration


def resolved(gpus: int = 8, **changes: Any) -> ResolvedPlan:
    plan = Plan.of("llama-3-8b", gpu="h100-sxm-80gb", gpus=gpus, strategy="ddp")
    return plan.replace(**{"training.global_batch": 64, **changes}).resolve()


def in_racks(plan: ResolvedPlan, **racks: Any) -> ResolvedPlan:
    fabric = plan.fabric.model_copy(update=racks)
    return plan.model_copy(update={"cluster": plan.cluster.model_copy(update={"fabric": fabric})})


def test_a_calibrated_plan_is_priced_with_its_measured_curves(tmp_path: Path) -> None:
    path = tmp_path / "calibration.yaml"
    calibration_file.write_calibration(calibration.made(), path)
    datasheet, measured = (calibration.plan(of).resolve() for of in (None, path))
    found = choose_for_plan(measured)
    assert found.seconds != choose_for_plan(datasheet).seconds
    full, known = with_calibration(measured)
    link = machine_model(measured, 2).links[0]
    assert link.bandwidth == full.gpu.link_gbs * 1e9 * known.link_share
    assert link.latency == full.fabric.link_latency_us * 1e-6
    summed = [m for row in found.rows for m in row.moves if m.kind == "all_reduce"]
    assert summed
    for move in summed:
        once = collective_seconds("all_reduce", 1.0, 2, link, known) - 2 * link.latency
        assert (move.seconds - move.bytes * once) / (2 * link.latency) == pytest.approx(
            1.0, rel=1e-6
        ) or move.tensor in ("weight", "table")


@pytest.mark.parametrize("stack", ["llm-foundry", "megatron-2021", "hf-trainer", "torchtune"])
def test_a_framework_profile_prices_its_own_kernels(stack: str) -> None:
    own, other = resolved(), resolved(**{"strategy.stack": stack})
    assert choose_for_plan(other).seconds != choose_for_plan(own).seconds


def test_a_framework_profile_keeps_its_own_optimizer_state() -> None:
    own, other = resolved(), resolved(**{"strategy.stack": "nanotron"})
    assert tensor_bytes(own).state == 2 + 4 + 8 + 4
    assert tensor_bytes(other).state == 2 + 2 + 4 + 8 + 4  # bf16 gradients beside an fp32 sum
    assert choose_for_plan(own, (8,)).bytes < choose_for_plan(other, (8,)).bytes


def test_links_between_racks_are_slower_than_within_one() -> None:
    flat = resolved(32)
    split = in_racks(flat, rack_nodes=2, rack_gbs=20.0, rack_latency_us=50.0)
    roomy = in_racks(flat, rack_nodes=4, rack_gbs=20.0, rack_latency_us=50.0)
    assert choose_for_plan(roomy).seconds == choose_for_plan(flat).seconds
    assert choose_for_plan(split).seconds > choose_for_plan(flat).seconds
    between, within = machine_model(split, (4, 8)).links
    assert within == machine_model(flat, (4, 8)).links[1]
    known = constants(flat.gpu, flat.strategy.kernels)
    reached = known.nic_in_step * (flat.fabric.nic_share or known.nic_share)
    assert between.bandwidth == pytest.approx(20e9 * reached * 2 / 8)
    assert between.latency == pytest.approx((6.0 + 45.0 / 2) * 1e-6)
