"""Offloading before other hardware: what `search` tries, and what the smallest change names."""

import pytest

import workbench as wb
from workbench.costmodel.compute.roofline import host_gbs
from workbench.costmodel.inputs.config import fixed_config
from workbench.machine import gpu_catalog
from workbench.planner.calibrated_plan import with_calibration
from workbench.planner.memory_advice import planned_memory
from workbench.planner.plan_changes import gpus_with_more_memory, larger_gpus
from workbench.planner.search.least_memory import least_memory_plan
from workbench.planner.search.search_space import search_space
from workbench.planner.search.space_scan import scan_space

V100 = "v100-sxm2-32gb"
SMALL_HOST = gpu_catalog.clusters()["dgx-2-v100"].model_copy(update={"host_memory_gib": 100.0})
OF_13B = {
    "strategy.precision": "fp16",
    "training.sequence_length": 1024,
    "training.micro_batch": 1,
    "training.global_batch": 1,
}


def of(model: str, gpu: str, gpus: int, strategy: str = "ddp", **more: object) -> wb.Plan:
    return wb.Plan.of(model, gpu=gpu, gpus=gpus, strategy=strategy, set=more)


def test_search_offloads_13b_to_train_it_on_one_v100() -> None:
    found = wb.search(of("gpt3-13b", V100, 1, **OF_13B), top=20)
    assert found.top
    kept = {(c.plan.strategy.data.zero, c.plan.strategy.data.offload) for c in found.top}
    assert kept == {(2, "optimizer"), (3, "parameters")}
    assert all(c.plan.strategy.data.reduce == "microbatch" for c in found.top)


@pytest.mark.parametrize("model", ["opt-13b", "gpt3-13b", "pangu-13b", "llama-2-13b"])
def test_search_and_estimate_count_the_same_of_13b(model: str) -> None:
    found = wb.search(of(model, V100, 1, **OF_13B), top=20, where=["strategy.recompute=full"])
    assert {c.plan.strategy.data.offload for c in found.top} == {"optimizer", "parameters"}
    for candidate in found.top:
        profile = wb.estimate(candidate.plan)
        peak = max(profile.peak_bytes_by_rank.values())
        assert profile.fits and candidate.peak_bytes == pytest.approx(peak, rel=1e-6)


def test_plain_data_parallelism_ends_between_1_4b_and_2b_on_a_v100() -> None:
    assert not wb.search(
        wb.Plan.of("gpt2", gpu=V100, gpus=1).replace(model=_gpt2(40, 2048), **OF_13B),
        where=["strategy.data.offload=none"],
    ).top
    fits = wb.Plan.of("gpt2", gpu=V100, gpus=1).replace(model=_gpt2(26, 2048), **OF_13B)
    assert wb.estimate(fits).fits


def _gpt2(layers: int, hidden: int) -> dict[str, object]:
    shape = wb.Plan.of("gpt2", gpus=1).resolve().shape.model_dump(exclude={"head_dim", "name"})
    heads = hidden // 128
    return shape | {
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": heads,
        "ffn": 4 * hidden,
    }


@pytest.mark.parametrize("strategy", ["ddp", "zero-1", "zero-offload"])
def test_the_smallest_change_offloads_before_it_names_hardware(strategy: str) -> None:
    plan = of("gpt3-13b", V100, 1, strategy, **OF_13B)
    found = wb.estimate(plan).notes["advice"]
    assert not any(field.startswith("cluster") for field in found["changes"])
    changed = plan.replace(**found["changes"]).resolve()
    assert changed.strategy.data.offload != "none" and planned_memory(changed).fits


def test_linears_are_tiled_where_a_layer_is_too_large_and_before_hardware_is_named() -> None:
    large = {"cluster.fabric": SMALL_HOST.model_copy(update={"host_memory_gib": 4000.0})}
    plan = of("gpt3-175b", "v100-sxm2-16gb", 1, "zero-infinity", **OF_13B, **large)
    change = wb.estimate(plan).notes["advice"]["changes"]
    assert change["strategy.data.tile_factor"] == 2
    assert planned_memory(plan.replace(**change).resolve()).fits
    found = wb.search(plan)
    assert {c.plan.strategy.data.tile_factor for c in found.top} == {2}
    profile = wb.estimate(found.top[0].plan)
    assert profile.fits and profile.step_seconds == pytest.approx(found.top[0].seconds, rel=1e-9)
    assert max(profile.peak_bytes_by_rank.values()) == pytest.approx(found.top[0].peak_bytes)


def test_linears_are_tiled_only_where_a_plan_does_not_fit_without() -> None:
    plan = of("llama-3-70b", V100, 1, "zero-infinity", **OF_13B)
    tiles = {c.plan.strategy.data.tile_factor for c in wb.search(plan, top=100).top}
    least = wb.search(plan, where=["peak_gib<9"]).top
    assert tiles == {1} and {c.plan.strategy.data.tile_factor for c in least} == {2}


@pytest.mark.parametrize("gpu", ["t4", V100, "h100-sxm-80gb", "mi300x"])
@pytest.mark.parametrize("model", ["llama-3-8b", "gpt3-13b", "llama-2-70b"])
@pytest.mark.parametrize("gpus", [1, 4, 8])
def test_hardware_is_named_only_where_no_strategy_fits(gpu: str, model: str, gpus: int) -> None:
    plan = of(model, gpu, gpus)
    profile = wb.estimate(plan)
    if profile.fits:
        return
    least = least_memory_plan(plan)
    assert least is not None
    if any(field.startswith("cluster") for field in profile.notes["advice"]["changes"]):
        assert not planned_memory(least.resolve()).fits


def test_inputs_of_recomputed_layers_are_offloaded_before_hardware_is_named() -> None:
    plan = of("llama-3-70b", "h100-sxm-80gb", 1, **{"training.sequence_length": 32768})
    plan = plan.replace(**{"training.global_batch": 1})
    least = least_memory_plan(plan)
    assert least is not None and not planned_memory(least.resolve()).fits
    found = wb.estimate(plan).notes["advice"]["changes"]
    assert found["strategy.offload_activations"] is True
    assert not any(field.startswith("cluster") for field in found)
    assert wb.estimate(plan.replace(**found)).fits


@pytest.mark.parametrize("gpu", ["t4", V100, "mi250x-gcd", "h100-sxm-80gb"])
def test_another_vendors_gpu_comes_after_every_way_on_the_same_vendors(gpu: str) -> None:
    plan = of("llama-3-8b", gpu, 8).resolve()
    vendors = [
        gpu_catalog.gpus()[change["cluster.gpu"]].gpu.title.split()[0]
        for change in larger_gpus(plan)
    ]
    own = plan.gpu.title.split()[0]
    first_other = next((i for i, v in enumerate(vendors) if v != own), len(vendors))
    assert own in vendors and own not in vendors[first_other:]
    assert all(gpus_with_more_memory(plan.gpu))


def test_the_least_memory_plan_has_the_least_peak_of_the_space() -> None:
    plan = of("gpt3-13b", V100, 8, **(OF_13B | {"training.global_batch": 8}))
    least = least_memory_plan(plan)
    assert least is not None
    gib = planned_memory(least.resolve()).peak_bytes / 2**30
    assert not wb.search(plan, where=[f"peak_gib<{0.9999 * gib}"]).top
    assert wb.search(plan, where=[f"peak_gib<{1.0001 * gib}"]).top


def test_what_the_host_does_not_hold_does_not_fit() -> None:
    plan = of("gpt3-13b", V100, 1, "zero-infinity", **OF_13B, **{"strategy.recompute": "full"})
    short = plan.replace(**{"cluster.fabric": SMALL_HOST.model_dump()})
    profile = wb.estimate(short)
    assert wb.estimate(plan).fits and profile.fits is False and profile.exceeds_host
    assert max(profile.peak_bytes_by_rank.values()) < profile.capacity_bytes
    assert profile.host_capacity_bytes == 100 * 2**30
    found = wb.search(short)
    assert not found.top and "offload more than a host of 100.0 GiB holds" in found.empty
    assert "x v100-sxm2-32gb would do" in found.empty and "--risk" not in found.empty
    assert scan_space(search_space(short), (), "time", 1).beyond_host > 0


def test_host_memory_is_shared_by_the_ranks_of_a_node() -> None:
    shares = {
        gpus: of("gpt3-13b", V100, gpus, "zero-infinity").resolve().host_capacity_bytes
        for gpus in (1, 4, 16, 32)
    }
    assert shares == {1: 1536 * 2**30, 4: 384 * 2**30, 16: 96 * 2**30, 32: 96 * 2**30}


@pytest.mark.parametrize(
    ("gpu", "gpus", "stack", "rate"),
    [
        (V100, 1, "workbench", 64.0),
        (V100, 2, "workbench", 64.0),
        (V100, 16, "workbench", 8.0),
        (V100, 64, "workbench", 8.0),
        ("gh200-96gb", 1, "workbench", 192.0),
        ("rtx-4090", 1, "workbench", 100.0),
        (V100, 1, "deepspeed-zero", 25.0),
    ],
)
def test_a_rank_steps_at_its_share_of_the_hosts_bandwidth_at_most_a_socket(
    gpu: str, gpus: int, stack: str, rate: float
) -> None:
    plan = of("gpt3-13b", gpu, gpus, "zero-offload", **{"strategy.stack": stack})
    full, constants = with_calibration(plan.resolve())
    assert host_gbs(fixed_config(full), constants) == pytest.approx(rate)


def test_a_host_of_unknown_memory_is_said() -> None:
    plan = of(
        "gpt3-13b", "rtx-4090", 1, "zero-infinity", **OF_13B, **{"strategy.recompute": "full"}
    )
    said = wb.estimate(plan).notes["assumed_hardware"]
    assert "host of workstation is not known" in said and "host_memory_gib" in said
    known = plan.replace(**{"cluster.fabric.host_memory_gib": 512.0})
    assert "assumed_hardware" not in wb.estimate(known).notes
