"""What was published near a plan: the highest MFU on its GPU, the nearest measured step, and what a
plan is far in from it.
"""

from __future__ import annotations

import math
from typing import Any

import pytest

from workbench.lab.panel.fit_verdict import published_lines
from workbench.machine import gpu_catalog
from workbench.plan.schema import Plan
from workbench.planner import estimate
from workbench.planner.published_steps import (
    MeasuredStep,
    beyond_published,
    highest_mfu,
    is_measured,
    measured_steps,
    published_beside,
)
from workbench.planner.search import search


def plan_of(model: str, gpu: str, gpus: int, strategy: str = "zero-3", stack: str = "") -> Plan:
    changes = {"strategy.stack": stack} if stack else {}
    return Plan.of(model, gpu=gpu, gpus=gpus, strategy=strategy, set=changes)


def test_every_measured_step_is_believable() -> None:
    steps = measured_steps()
    assert len(steps) > 300 and len({tuple(step.to_list()[:-2]) for step in steps}) == len(steps)
    assert all(0 < step.mfu < 1 for step in steps)
    assert all(step.mfu < 0.72 for step in steps if step.gpu.startswith(("a100", "h100", "b200")))


def test_the_highest_mfu_is_of_that_gpu_and_precision_near_that_scale() -> None:
    def step(gpu: str, gpus: int, precision: str, mfu: float) -> MeasuredStep:
        return MeasuredStep(gpu, gpus, 7e9, 4096, "fsdp", precision, mfu, "a", "b")

    steps = [
        step("a", 64, "bf16", 0.4),
        step("a", 8, "bf16", 0.6),
        step("a", 64, "fp8", 0.5),
        step("b", 64, "bf16", 0.7),
    ]
    assert highest_mfu(steps, "a", 128, 7e9, "bf16") == steps[0]
    assert highest_mfu(steps, "a", 16, 20e9, "bf16") == steps[1]
    assert highest_mfu(steps, "a", 512, 7e9, "bf16") is None
    assert highest_mfu(steps, "a", 128, 70e9, "bf16") is None


def test_a_measured_configuration_extrapolates_nothing() -> None:
    plan = plan_of("llama-3-8b", "h100-sxm-80gb", 128, stack="llm-foundry").replace(
        **{"training.sequence_length": 2048}
    )
    found = published_beside(plan.resolve(), "llm-foundry")
    assert found["extrapolates"] is None
    assert "llm-foundry, 6.66 B parameters on 128 h100-sxm-80gb" in found["nearest"]


@pytest.mark.parametrize(
    ("model", "gpu", "gpus", "stack", "words"),
    [
        ("llama-3.1-405b", "h100-sxm-80gb", 16384, "nanotron", "times its GPUs"),
        ("gpt2-xl", "v100-sxm2-32gb", 8, "llm-foundry", "v100-sxm2-32gb instead of its GPU"),
        ("llama-3-8b", "h100-sxm-80gb", 64, "colossalai", "no published run of this framework"),
    ],
)
def test_a_plan_far_from_everything_measured_says_in_what(
    model: str, gpu: str, gpus: int, stack: str, words: str
) -> None:
    plan = plan_of(model, gpu, gpus, stack=stack).resolve()
    assert words in published_beside(plan, stack)["extrapolates"]


def test_a_gpu_of_other_figures_under_a_catalog_name_has_nothing_published() -> None:
    plan = plan_of("llama-3-8b", "h100-sxm-80gb", 64)
    own = gpu_catalog.gpus()["h100-sxm-80gb"].gpu

    def beside(**changes: object) -> dict[str, Any]:
        inline = own.model_copy(update=changes).model_dump()
        return published_beside(plan.replace(**{"cluster.gpu": inline}).resolve(), "llm-foundry")

    of_catalog = published_beside(plan.resolve(), "llm-foundry")
    assert beside() == beside(memory_gib=94.0) == of_catalog and of_catalog["highest_mfu"]
    for changes in ({"tflops": {"bf16": 400.0}}, {"bandwidth_gbs": 2000.0}, {"watts": 350.0}):
        found = beside(**changes)
        assert found["highest_mfu"] is found["highest_mfu_of"] is None
        assert "h100-sxm-80gb of other figures instead of its GPU" in found["extrapolates"]


def test_an_estimate_shows_it_and_cpu_ranks_have_none() -> None:
    shown = estimate(plan_of("llama-3-8b", "h100-sxm-80gb", 64)).notes["published"]
    assert math.isclose(shown["highest_mfu"], 0.4386, abs_tol=0.02)
    assert "published" not in estimate(plan_of("tiny", "local", 2, "ddp")).notes


def test_a_promise_above_everything_published_is_called_so() -> None:
    near = {"highest_mfu": 0.53}
    assert beyond_published(near, 0.6) == (
        "60.0% MFU is above the best published near this scale, 53.0%"
    )
    assert not beyond_published(near, 0.53) and not beyond_published({"highest_mfu": None}, 0.9)
    assert not beyond_published({}, 0.9)


def test_beside_every_plan_of_a_search_stands_what_was_published() -> None:
    plan = plan_of("gpt3-175b", "a100-sxm-80gb", 384).replace(
        **{"training.global_batch": 1536, "training.sequence_length": 2048}
    )
    found = search(plan, top=3, where=["strategy.pipeline.size in 6,8"])
    first = found.top[0]
    alone = estimate(first.plan)
    assert first.mfu == pytest.approx(alone.notes["model_flops_utilisation"], rel=1e-9)
    assert {**first.published, "promise": first.promise or None} == alone.notes["published"]
    assert first.mfu > first.published["highest_mfu"] and first.promise
    for shown in (repr(found), found._repr_html_()):
        assert first.promise in shown and first.published["nearest"] in shown
        assert f"{first.mfu:.1%} above" in shown and "error may be larger: " in shown
    told = found.to_json()["top"][0]
    assert told["published"]["promise"] == first.promise
    assert told["model_flops_utilisation"] == first.mfu
    lines = published_lines(alone)
    assert (
        first.promise in lines
        and f"error may be larger: {first.published['extrapolates']}" in lines
    )


def test_a_search_over_fewer_gpus_shows_what_was_published_near_each_number() -> None:
    found = search(plan_of("llama-3-8b", "h100-sxm-80gb", 64), "gpus", top=1000)
    worlds = {one.plan.world_size: one.published for one in found.top}
    assert len(worlds) > 1
    for gpus, published in worlds.items():
        beside = published_beside(
            plan_of("llama-3-8b", "h100-sxm-80gb", gpus).resolve(), "workbench"
        )
        assert published == beside


def test_plans_of_cpu_ranks_have_nothing_beside_them() -> None:
    found = search(plan_of("tiny", "local", 2, "ddp"), top=1)
    assert found.top[0].to_json()["published"] is None
    assert "published MFU" not in repr(found)


def own_gpu(precision: str = "bf16", **figures: object) -> Plan:
    """A plan on a GPU of the user's own, with what an H100 has but its generation."""
    gpu = {
        "name": "my-gpu",
        "memory_gib": 80,
        "bandwidth_gbs": 3350,
        "tflops": {"fp8": 1979, "bf16": 989, "fp32": 67},
        "link_gbs": 450,
        "pcie_gbs": 60,
    }
    model = {"model": "llama-3-8b", "strategy": {"preset": "zero-3", "precision": precision}}
    return Plan.model_validate({**model, "cluster": {"gpus": 8, "gpu": gpu | figures}})


def test_a_gpu_of_unknown_generation_is_further_than_one_of_a_measured_one() -> None:
    def width(plan: Plan) -> float:
        low, high = estimate(plan).step_interval or (0.0, 0.0)
        return high / low

    unknown, known = own_gpu(), own_gpu(architecture="hopper", multiprocessors=132)
    assert width(unknown) == width(own_gpu(architecture="martian")) > width(known)
    assert "my-gpu instead of its GPU" in estimate(unknown).notes["published"]["extrapolates"]


@pytest.mark.parametrize(
    ("figures", "words"),
    [
        ({}, ("generation of my-gpu is not given", "Give cluster.gpu.architecture (volta, ")),
        ({"architecture": "martian"}, ("is 'martian'", "cluster.gpu.multiprocessors")),
        ({"architecture": "hopper"}, ("small GEMMs", "Give cluster.gpu.multiprocessors, or")),
    ],
)
def test_what_a_gpu_leaves_out_is_said_with_what_would_help(
    figures: dict[str, object], words: tuple[str, str]
) -> None:
    plan = own_gpu(**figures)
    said = estimate(plan).notes["assumed_hardware"]
    assert all(one in said for one in words)
    found = search(plan, top=1)
    assert found.to_json()["assumed_hardware"] == said and said in repr(found)
    assert said in published_lines(estimate(plan))


def test_fp8_asks_for_the_layouts_that_its_gemms_take() -> None:
    figures = {"architecture": "hopper", "multiprocessors": 132}
    said = estimate(own_gpu("fp8", **figures)).notes["assumed_hardware"]
    assert "a transposed copy is kept" in said
    assert "Give cluster.gpu.fp8_gemm_layouts (tn, all), or calibrate" in said
    complete = own_gpu("fp8", fp8_gemm_layouts="tn", **figures)
    assert "assumed_hardware" not in estimate(complete).notes
    with pytest.raises(ValueError, match="'tn' or 'all'"):
        own_gpu("fp8", fp8_gemm_layouts="nt", **figures)


def test_a_complete_gpu_leaves_nothing_out() -> None:
    complete = own_gpu(architecture="hopper", multiprocessors=132)
    for plan in (complete, plan_of("llama-3-8b", "mi300x", 8), plan_of("tiny", "local", 2, "ddp")):
        assert "assumed_hardware" not in estimate(plan).notes


def test_another_precision_than_the_nearest_steps_is_said() -> None:
    plan = plan_of("gpt3-175b", "h100-sxm-80gb", 512, "megatron-3d", stack="nemo")
    plan = plan.replace(**{"training.sequence_length": 2048})
    found = published_beside(plan.resolve(), "nemo")
    assert ", fp8 (" in found["nearest"] and "bf16 instead of its fp8" in found["extrapolates"]


def test_a_framework_is_measured_where_another_site_has_a_step_of_it() -> None:
    sites = {step.site for step in measured_steps() if step.framework == "internevo"}
    assert len(sites) == 1 and is_measured("internevo")
    assert not is_measured("internevo", *sites) and not is_measured("textbook")
