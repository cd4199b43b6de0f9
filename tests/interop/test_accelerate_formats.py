"""accelerate's YAML: FSDP, DeepSpeed and plain data parallelism."""

from pathlib import Path
from typing import Any

import pytest

from tests.interop.foreign_samples import GPU_NAME, ON_16, assumed, left, load, problems
from workbench import interop
from workbench.interop.accelerate import read_fsdp
from workbench.interop.export import export
from workbench.interop.translation import ImportOptions
from workbench.plan.schema import Plan


def test_an_accelerate_yaml_with_fsdp() -> None:
    found = load("accelerate.yaml", model="llama-3-8b")
    plan, data = found.plan, found.plan.strategy.data
    assert (plan.cluster.gpus, plan.cluster.nodes, plan.strategy.stack) == (16, 2, "fsdp")
    assert (data.zero, data.shard, data.overlap) == (3, 8, True)
    assert plan.strategy.recompute == "full" and plan.strategy.precision == "bf16"
    assert "training.global_batch" in assumed(found) and left(found)["rdzv_backend"] == "static"


@pytest.mark.parametrize(
    "word, zero",
    [("FULL_SHARD", 3), ("SHARD_GRAD_OP", 2), ("NO_SHARD", 0), (1, 3), ("full_shard", 3)],
)
def test_sharding_strategies(word: int | str, zero: int) -> None:
    config = {
        "distributed_type": "FSDP",
        "num_processes": 8,
        "fsdp_config": {"sharding_strategy": word},
    }
    assert (
        read_fsdp.read(config, ON_16 and ImportOptions("tiny", GPU_NAME)).plan.strategy.data.zero
        == zero
    )


def test_the_second_version_keeps_or_frees_gathered_parameters() -> None:
    section = {"fsdp_version": 2, "fsdp_reshard_after_forward": False}
    data = read_fsdp.read(
        {"distributed_type": "FSDP", "fsdp_config": section}, ON_16
    ).plan.strategy.data
    assert (data.zero, data.keep_gathered) == (3, True)


@pytest.mark.parametrize("kind, gpus", [("MULTI_GPU", 8), ("MULTI_NPU", 8), ("NO", 1)])
def test_an_accelerate_yaml_without_sharding(kind: str, gpus: int) -> None:
    text = (
        f"distributed_type: {kind}\nmixed_precision: bf16\ngpu_ids: all\nfsdp_config: "
        f"{{fsdp_version: 2}}\n"
    )
    found = interop.read(
        text + (f"num_processes: {gpus}\n" if gpus > 1 else ""), model="tiny", gpu=GPU_NAME
    )
    full = found.plan.resolve()
    assert (full.cluster.gpus, full.strategy.data.zero, full.strategy.precision) == (
        gpus,
        0,
        "bf16",
    )
    assert full.strategy.gradient_dtype == "fp32"
    assert set(left(found)) == {"mixed_precision", "gpu_ids", "fsdp_config.fsdp_version"}
    assert {"training.global_batch", "strategy.recompute"} <= set(assumed(found))


def test_a_launch_without_a_kind_is_one_process_whatever_number_stands_beside() -> None:
    text = "distributed_type: 'NO'\nmixed_precision: bf16\nnum_machines: 1\nnum_processes: 8\n"
    found = interop.read(text, model="tiny", gpu=GPU_NAME)
    assert found.plan.cluster.gpus == 1 and left(found)["num_processes"] == 8


def test_the_launchers_half_of_an_export_is_the_plan_beside_it(tmp_path: Path) -> None:
    plan = Plan.of("tiny", gpu=GPU_NAME, gpus=4, strategy="zero-3", set={"training.steps": 7})
    export(plan, tmp_path)
    found = interop.load(tmp_path / "accelerate.yaml")
    assert found.plan.resolve() == Plan.load(tmp_path / "plan.yaml").resolve()
    assert {"num_processes", "distributed_type", "mixed_precision"} <= {
        note.field for note in found.ignored
    }
    assert str(tmp_path / "plan.yaml") in found.ignored[0].why
    more = interop.load(tmp_path / "accelerate.yaml", set={"training.steps": 9})
    assert more.plan.training.steps == 9
    text = (
        (tmp_path / "accelerate.yaml").read_text().replace("num_processes: 4", "num_processes: 8")
    )
    (tmp_path / "accelerate.yaml").write_text(text)
    assert "cluster.gpus 4" in problems(interop.load, tmp_path / "accelerate.yaml")["num_processes"]


@pytest.mark.parametrize(
    "section, overlap, zero",
    [
        ({"fsdp_backward_prefetch_policy": "NO_PREFETCH", "fsdp_sharding_strategy": 2}, False, 2),
        ({"backward_prefetch_policy": "BACKWARD_POST", "sharding_strategy": 5}, True, 2),
        (
            {
                "fsdp_backward_prefetch": 3,
                "fsdp_sharding_strategy": "1",
                "fsdp_limit_all_gathers": True,
            },
            False,
            3,
        ),
    ],
)
def test_older_names_of_fsdp(section: dict[str, Any], overlap: bool, zero: int) -> None:
    config = {
        "distributed_type": "FSDP",
        "num_processes": 8,
        "fsdp_config": section,
        "dynamo_backend": "INDUCTOR",
    }
    found = read_fsdp.read({**config, "fp16": True}, ImportOptions("tiny", GPU_NAME)).plan.strategy
    assert (found.data.overlap, found.data.zero, found.precision, found.kernels) == (
        overlap,
        zero,
        "fp16",
        "compiled",
    )


@pytest.mark.parametrize(
    "word, offload, told",
    [
        ("FULL_SHARD", "parameters", ""),
        ("NO_SHARD", "none", "nothing is"),
        ("SHARD_GRAD_OP", "optimizer", "optimizer's states"),
    ],
)
def test_what_fsdp_offloads(word: str, offload: str, told: str) -> None:
    section = {"fsdp_sharding_strategy": word, "fsdp_offload_params": True}
    config = {"distributed_type": "FSDP", "num_processes": 8, "fsdp_config": section}
    found = read_fsdp.read(config, ImportOptions("tiny", GPU_NAME))
    why = {note.field: note.why for note in found.untranslated}
    assert found.plan.resolve().strategy.data.offload == offload
    assert told in why.get("fsdp_config.fsdp_offload_params", "")
    assert bool(told) == ("fsdp_config.fsdp_offload_params" in why)


@pytest.mark.parametrize("kind", ["FSDP", "DEEPSPEED", "MULTI_GPU"])
def test_experts_on_the_host_are_refused_by_their_engine(kind: str) -> None:
    text = f"distributed_type: {kind}\nnum_processes: 8\nkt_config: "
    given = {"model": "llama-3-8b", "gpu": GPU_NAME}
    said = problems(interop.read, text + "{enabled: true, kt_num_threads: 96}\n", **given)
    assert "KTransformers" in said["kt_config"]
    off = left(interop.read(text + "{enabled: false}\n", **given))
    assert off["kt_config.enabled"] is False


@pytest.mark.parametrize("kind", ["FSDP", "DEEPSPEED", "MULTI_GPU"])
def test_fp8_is_what_products_are_computed_in_under_each_launcher(kind: str) -> None:
    text = f"distributed_type: {kind}\nmixed_precision: fp8\nnum_processes: 2\n"
    strategy = interop.read(text, model="tiny", gpu="h100-sxm-80gb").plan.strategy
    assert strategy.precision == "fp8"
    if kind == "DEEPSPEED":
        assert strategy.gradient_dtype == "bf16"
