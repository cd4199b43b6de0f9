"""Give what `translate` writes to the framework that is to read it: each in folders of its own
below `.pytest_cache/consumers`, never in the environment of the tests. No GPU, and no ranks.
"""

import shlex
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings

from tests.interop.consumers import SHARED, answers, unpacked
from tests.interop.test_round_trips import plans
from workbench import interop
from workbench.errors import PlanError
from workbench.plan.schema import Plan

pytestmark = pytest.mark.slow

B200, H100, A100, V100 = "b200", "h100-sxm-80gb", "a100-sxm-80gb", "v100-sxm2-32gb"
UNEVEN = {"strategy.pipeline.partition": [9, 8, 8, 7], "strategy.pipeline.schedule": "1f1b"}
PLANS: dict[str, Plan] = {
    "fsdp": Plan.of("llama-3-8b", gpu=H100, gpus=8, strategy="fsdp"),
    "uneven-3d": Plan.of(
        "llama-3-8b",
        gpu=H100,
        gpus=32,
        strategy="megatron-3d",
        set={"strategy.tensor.size": 4, "strategy.pipeline.size": 4, **UNEVEN},
    ),
    "offload-fp16": Plan.of(
        "llama-2-7b", gpu=V100, gpus=8, strategy="zero-offload", set={"strategy.precision": "fp16"}
    ),
    "infinity": Plan.of("llama-3-70b", gpu=A100, gpus=16, strategy="zero-infinity"),
    "experts": Plan.of("mixtral-8x7b", gpu=H100, gpus=64, strategy="expert-parallel"),
    "deepseek": Plan.of(
        "deepseek-v3",
        gpu=H100,
        gpus=256,
        strategy="fsdp",
        set={"strategy.expert.size": 32, "strategy.tensor.size": 2},
    ),
    "4d": Plan.of(
        "llama-3-70b",
        gpu=H100,
        gpus=64,
        strategy="megatron-3d",
        set={
            "strategy.tensor.size": 4,
            "strategy.pipeline.size": 4,
            "strategy.context.size": 2,
            "strategy.kernels": "eager",
        },
    ),
    "interleaved-1024": Plan.of(
        "gpt3-175b",
        gpu=A100,
        gpus=1024,
        strategy="interleaved",
        set={"strategy.pipeline.size": 8, "strategy.tensor.size": 8},
    ),
    "hybrid-shard": Plan.of("llama-3-8b", gpu=H100, gpus=32, strategy="hybrid-shard"),
    "ring": Plan.of("llama-3-8b", gpu=H100, gpus=8, strategy="ring-attention"),
    "ulysses": Plan.of("llama-3-8b", gpu=H100, gpus=8, strategy="ulysses"),
    "usp": Plan.of("llama-3-8b", gpu=H100, gpus=8, strategy="usp"),
    "fp8": Plan.of(
        "llama-3-70b",
        gpu=H100,
        gpus=64,
        strategy="fsdp",
        set={"strategy.precision": "fp8", "strategy.kernels": "eager", "checkpoint.every": 100},
    ),
    "lora": Plan.of("llama-3-8b", gpu=H100, gpus=8, strategy="fsdp", set={"finetune.lora.rank": 8}),
    "all-said": Plan.of(
        "llama-3-8b",
        gpu=B200,
        gpus=16,
        strategy="fsdp",
        set={
            "strategy.precision": "mxfp8",
            "strategy.kernels": "compiled",
            "strategy.recompute": [1, 3, 5, 7],
            "strategy.data.offload": "parameters",
            "training.evaluation.every": 50,
            "training.deterministic": True,
            "training.seed": 7,
            "checkpoint.every": 100,
            "telemetry.trackers": ["wandb", "tensorboard"],
            "name": "a 'plan' \"said\" wholly",
        },
    ),
    "experts-tensor": Plan.of(
        "deepseek-v2-lite",
        gpu=H100,
        gpus=32,
        strategy="ddp",
        set={"strategy.expert.size": 8, "strategy.tensor.size": 4},
    ),
    "tiny": Plan.of("tiny", gpu=H100, gpus=4, strategy="zero-1"),
}


class Answers(NamedTuple):
    """Answers of a framework to its texts, and why the others were not written."""

    said: dict[str, str]
    refused: dict[str, str]

    def expect(self, unwritten: Collection[str] = ()) -> None:
        """Raise where the framework refuses a text, or where others than these are not written."""
        assert self.said, "nothing was written"
        assert not {name: why for name, why in self.said.items() if why}
        assert set(self.refused) == set(unwritten), self.refused


@settings(
    max_examples=30,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
@given(plan=plans())
def _draw(found: list[Plan], plan: Plan) -> None:
    found.append(plan)


@pytest.fixture(scope="module")
def many() -> dict[str, Plan]:
    """Plans of people, and plans drawn with every field that some format can say."""
    drawn: list[Plan] = []
    _draw(drawn)
    return {**PLANS, **{f"drawn-{number}": plan for number, plan in enumerate(drawn)}}


def written(
    plans: dict[str, Plan], format: Any, folder: Path, suffix: str, version: str | None = None
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """(a job of each plan: its name, text, file and sizes, why each of the others is refused)."""
    jobs, refused = [], {}
    for name, plan in plans.items():
        try:
            text = interop.write(plan, format, version).text
        except PlanError as error:
            refused[name] = str(error)
            continue
        path, full = folder / f"{name.replace('-', '_')}{suffix}", plan.resolve()
        path.write_text(text)
        mesh = {"data": full.sizes["data"], "sequence": full.sizes["context"]}
        job = {"name": name, "path": str(path), "text": text, "world": full.world_size}
        jobs.append({**job, "mesh": mesh})
    return jobs, refused


@pytest.mark.parametrize("version", interop.VERSIONS["torchtitan"])
def test_torchtitan_reads_its_jobs(version: str, many: dict[str, Plan], tmp_path: Path) -> None:
    suffix = "_job.py" if version == "0.3.0" else ".toml"
    jobs, refused = written(many, "torchtitan", tmp_path, suffix, version)
    folders = [unpacked(f"torchtitan-{version}", [f"torchtitan=={version}"])]
    found = Answers(
        answers("torchtitan_job", [*folders, unpacked("shared", SHARED)], jobs), refused
    )
    # A V100 has no bf16, and torchtitan no fp16.
    found.expect({"offload-fp16", *(name for name in refused if name.startswith("drawn"))})


def test_megatron_reads_its_arguments(many: dict[str, Plan], tmp_path: Path) -> None:
    jobs, refused = written(many, "megatron", tmp_path, ".sh")
    # Newer releases than this Python's hold `megatron.training`, and nothing of them is compiled.
    python = ("--python-version", "3.12", "--only-binary", ":all:")
    folder = unpacked("megatron-core", ["megatron-core==0.19.2"], *python)
    for job in jobs:
        words = shlex.split(job.pop("text").replace("\\\n", " "))
        variables = words[: words.index("torchrun")]
        job["environment"] = dict(word.split("=", 1) for word in variables)
        job["arguments"] = words[words.index("pretrain_gpt.py") + 1 :]
    found = answers("megatron_arguments", [folder, unpacked("shared", SHARED)], jobs)
    Answers(found, refused).expect({name for name in refused if name.startswith("drawn")})


def test_deepspeed_reads_its_config(many: dict[str, Plan], tmp_path: Path) -> None:
    jobs, refused = written(many, "deepspeed", tmp_path, ".json")
    folders = [unpacked("deepspeed", ["deepspeed==0.19.8"]), unpacked("shared", SHARED)]
    Answers(answers("deepspeed_config", folders, jobs), refused).expect()


def test_accelerate_reads_its_config(many: dict[str, Plan], tmp_path: Path) -> None:
    jobs, refused = written(many, "fsdp", tmp_path, ".yaml")
    Answers(answers("accelerate_config", [], jobs), refused).expect()
