"""torchtitan's job TOML, read as a plan and written from one."""

import pytest

from tests.interop.foreign_samples import GPU_NAME, left, load, problems
from workbench.interop.torchtitan import read_torchtitan
from workbench.interop.translation import ImportOptions


def test_a_torchtitan_job() -> None:
    found = load("torchtitan.toml")
    plan, data = found.plan, found.plan.strategy.data
    assert (plan.model, plan.name, plan.cluster.gpus, plan.strategy.stack) == (
        "llama-3-8b",
        "an 8B job",
        32,
        "torchtitan",
    )
    assert (data.zero, data.shard, data.reduce, data.keep_gathered) == (3, 8, "microbatch", False)
    assert (
        plan.strategy.tensor.sequence
        and plan.strategy.precision == "fp8"
        and plan.strategy.kernels == "compiled"
    )
    assert (
        plan.training.micro_batch,
        plan.training.global_batch,
        plan.training.sequence_length,
    ) == (2, 64, 8192)
    assert (plan.checkpoint.every, plan.checkpoint.keep) == (100, 3)
    assert set(left(found)) == {
        "job.dump_folder",
        "training.dataset",
        "parallelism.enable_async_tensor_parallel",
        "float8.recipe_name",
    }


@pytest.mark.parametrize(
    "name, flavor, model",
    [
        ("llama2", "7B", "llama-2-7b"),
        ("llama2", "70B", "llama-2-70b"),
        ("llama3", "1B", "llama-3.2-1b"),
        ("llama3", "3B", "llama-3.2-3b"),
        ("llama3", "8B_flex", "llama-3-8b"),
        ("simple_fsdp.llama3", "8B", "llama-3-8b"),
        ("deepseek_v3", "16B", "deepseek-v2-lite"),
        ("deepseek_v3", "236B", "deepseek-v2"),
    ],
)
def test_flavors_of_torchtitan_that_the_catalog_holds(name: str, flavor: str, model: str) -> None:
    found = read_torchtitan.read(
        {"model": {"name": name, "flavor": flavor}}, ImportOptions(None, GPU_NAME, 8)
    )
    assert found.plan.model == model
    assert bool(left(found)) == ("_" in flavor or "." in name)


@pytest.mark.parametrize(
    "name, flavor", [("llama3", "debugmodel"), ("llama2", "26B"), ("qwen3", "32B"), ("flux", "dev")]
)
def test_other_flavors_are_refused_with_the_remedy(name: str, flavor: str) -> None:
    words = problems(
        read_torchtitan.read,
        {"model": {"name": name, "flavor": flavor}},
        ImportOptions(None, GPU_NAME, 8),
    )["model"]
    assert (
        f"'{name}', model.flavor '{flavor}'" in words
        and "--model" in words
        and "llama3: 8B, 70B" in words
    )


def test_an_optimizer_that_a_plan_does_not_know_is_refused_unless_one_is_set() -> None:
    job = {"model": {"flavor": "8B"}, "optimizer": {"name": "Muon", "lr": 1e-3}}
    words = problems(read_torchtitan.read, job, ImportOptions(None, GPU_NAME, 8))["optimizer.name"]
    assert "'Muon'" in words and "--set training.optimizer.name" in words
    found = read_torchtitan.read(
        job, ImportOptions(None, GPU_NAME, 8, sets={"training.optimizer.name": "adamw"})
    )
    assert (
        left(found) == {"optimizer.name": "Muon"}
        and found.plan.training.optimizer.learning_rate == 1e-3
    )


def test_a_torchtitan_job_of_2024_has_its_degrees_elsewhere() -> None:
    text = """[model]\nflavor = "8B"\n[training]\nbatch_size = 1\ntensor_parallel_degree = 2
warmup_steps = 7
data_parallel_degree = -1\n[experimental]\npipeline_parallel_degree = 2\n"""
    full = read_torchtitan.read(text, ImportOptions(None, GPU_NAME, 8)).plan.resolve()
    assert full.sizes == {"tensor": 2, "context": 1, "data": 2, "pipeline": 2}
    assert full.training.optimizer.warmup_steps == 7


def test_every_second_layer_is_a_list_of_layers() -> None:
    text = (
        '[model]\nflavor = "8B"\n[activation_checkpoint]\nmode = '
        '"selective"\nselective_ac_option = "2"\n'
    )
    assert read_torchtitan.read(
        text, ImportOptions(None, GPU_NAME, 8)
    ).plan.strategy.recompute == list(range(1, 32, 2))


def test_a_pipeline_of_torchtitan_counts_its_own_microbatches() -> None:
    text = """[model]\nflavor = "8B"\n[training]\nlocal_batch_size = 8\n
[parallelism]\npipeline_parallel_degree = 4\npipeline_parallel_schedule = "ZBVZeroBubble"\n"""
    full = read_torchtitan.read(text, ImportOptions(None, GPU_NAME, 8)).plan.resolve()
    assert full.strategy.pipeline.schedule == "zb-v" and len(full.strategy.pipeline.partition) == 8
    assert full.training.micro_batch == 1 and full.num_microbatches == 8
    data = full.strategy.data
    assert (data.zero, data.reduce, data.keep_gathered) == (3, "step", True)
