"""The environment of a launch: NCCL, the allocator, what of the user's own stays, what is taken
away.
"""

import fcntl
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

from workbench.interop.export import contents
from workbench.interop.launch_environment import (
    ALLOCATOR,
    ROUNDING_SINCE,
    allocator_environment,
    allocator_settings,
    environment,
    of_another_launch,
    set_for_ranks,
    single_queue,
    users_own,
)
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.schema import Plan


def gpu_plan(gpu: str = "a100-sxm-80gb", gpus: int = 8, **strategy: Any) -> ResolvedPlan:
    shape = {"model": "llama-3-8b", "cluster": {"gpu": gpu, "gpus": gpus}, "strategy": strategy}
    return Plan.model_validate(shape).resolve()


def test_nccl_warns_and_its_kernels_go_first() -> None:
    found = environment(gpu_plan(preset="ddp"), cores=8)
    assert (found["NCCL_DEBUG"], found["TORCH_NCCL_HIGH_PRIORITY"]) == ("WARN", "1")
    assert (found["TORCH_NCCL_DUMP_ON_TIMEOUT"], found["TORCH_FR_BUFFER_SIZE"]) == ("1", "2000")
    kept = '"${TORCH_FR_BUFFER_SIZE:-${TORCH_NCCL_TRACE_BUFFER_SIZE:-2000}}"'
    script = contents(gpu_plan(preset="ddp"))["launch.sh"]
    assert f"export TORCH_FR_BUFFER_SIZE={kept}" in script.splitlines()
    local = Plan.of("tiny", gpu="local", gpus=2, strategy="ddp").resolve()
    if local.gpu.device == "cpu":
        assert not any(
            "NCCL" in name and name != "NCCL_SOCKET_IFNAME" for name in environment(local)
        )


@pytest.mark.parametrize(
    ("gpu", "strategy", "single"),
    [
        ("a100-sxm-80gb", {"tensor": {"size": 2}}, True),
        ("h100-sxm-80gb", {"context": {"size": 2}}, True),
        ("h100-sxm-80gb", {"tensor": {"size": [2, 2], "algorithm": "2d"}}, True),
        ("h100-sxm-80gb", {"tensor": {"size": 2}, "data": {"zero": 2}}, True),
        ("h100-sxm-80gb", {"tensor": {"size": 2}, "data": {"zero": 3}}, False),
        ("h100-sxm-80gb", {"data": {"zero": 1}, "pipeline": {"size": 4}}, False),
        ("b200", {"tensor": {"size": 2}}, False),
        ("mi300x", {"tensor": {"size": 2}}, False),
    ],
)
def test_kernels_keep_their_order_by_megatrons_rule(
    gpu: str, strategy: dict[str, Any], single: bool
) -> None:
    plan = gpu_plan(gpu, **strategy)
    assert single_queue(plan) is single
    assert ("CUDA_DEVICE_MAX_CONNECTIONS" in environment(plan)) is single
    assert ("CUDA_DEVICE_MAX_CONNECTIONS" in contents(plan)["launch.sh"]) is single


def test_the_installed_torch_knows_the_allocators_settings() -> None:
    """An unknown one ends every rank when it first asks for memory of a GPU."""
    known = (Path(torch.__file__).parent / "lib" / "libc10.so").read_bytes()
    for setting in allocator_settings(version("torch")).split(","):
        assert setting.split(":")[0].encode() in known
    rounding = b"pinned_max_round_threshold_mb" in known
    assert rounding is (tuple(map(int, version("torch").split(".")[:2])) >= ROUNDING_SINCE)


def test_blocks_that_are_not_rounded_are_not_cached() -> None:
    """torch 2.13 would give a request a cached block that is smaller than it."""
    settings = dict(item.split(":") for item in allocator_settings("2.13.0+cu130").split(","))
    assert settings["pinned_max_round_threshold_mb"] == settings["pinned_max_cached_size_mb"]
    for torch_version in ("2.11.0", "2.12.1+cu130"):
        assert allocator_settings(torch_version) == "expandable_segments:True"


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_settings_of_the_users_own_stand_alone(name: str) -> None:
    own = {name: "max_split_size_mb:128"}
    assert allocator_environment("2.13.0", own) == own
    assert allocator_environment("2.13.0", {name: ""}) == allocator_environment("2.13.0", {})


def test_the_users_nccl_variables_stay_but_for_one_nodes_interface() -> None:
    own = {"NCCL_DEBUG": "INFO", "NCCL_IB_HCA": "mlx5", "NCCL_SOCKET_IFNAME": "ib0", "HOME": "/"}
    network = {name: own[name] for name in ("NCCL_DEBUG", "NCCL_IB_HCA")}
    assert users_own(gpu_plan(preset="ddp"), own) == network
    assert users_own(gpu_plan(gpus=16, preset="ddp"), own) == {
        **network,
        "NCCL_SOCKET_IFNAME": "ib0",
    }


def test_variables_of_another_launch_are_known_by_their_prefix() -> None:
    stray = ["ACCELERATE_MIXED_PRECISION", "ACCELERATE_USE_CPU", "ACCELERATE_USE_FSDP"]
    stray += ["MASTER_ADDR", "PET_NNODES", "RANK", "TORCHELASTIC_RUN_ID"]
    assert of_another_launch(dict.fromkeys([*stray, "HOME", "NCCL_DEBUG"], "x")) == stray


def test_a_rank_that_nobody_supervises_records_what_it_was_given() -> None:
    plan = gpu_plan(tensor={"size": 2})
    given = {"NCCL_IB_HCA": "mlx5", "OMP_NUM_THREADS": "3", "HOME": "/", "SECRET": "no"}
    given |= {"CUDA_DEVICE_MAX_CONNECTIONS": "8", "PYTORCH_ALLOC_CONF": "backend:native"}
    kept = {name: value for name, value in given.items() if name not in ("HOME", "SECRET")}
    assert set_for_ranks(plan, given) == kept


def ranks_environment(folder: Path, plan: ResolvedPlan, **own: str) -> dict[str, str]:
    """What launch.sh gives `accelerate launch` in a shell that has `own`."""
    for file, text in contents(plan).items():
        (folder / file).write_text(text)
    (folder / "accelerate").write_text("#!/bin/sh\nenv\n")
    (folder / "accelerate").chmod(0o755)
    given = {"PATH": f"{folder}:/usr/bin:/bin", **own}
    script = ["bash", str(folder / "launch.sh")]
    done = subprocess.run(script, env=given, capture_output=True, text=True, check=True)
    return dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)


def test_a_shells_own_settings_go_before_the_scripts(tmp_path: Path) -> None:
    plan = gpu_plan(tensor={"size": 2})
    stray = {"RANK": "3", "ACCELERATE_USE_CPU": "true", "PET_NNODES": "7", "TORCHELASTIC_X": "1"}
    own = {"NCCL_DEBUG": "INFO", "NCCL_IB_HCA": "mlx5", "NCCL_SOCKET_IFNAME": "ib0"}
    found = ranks_environment(tmp_path, plan, **stray, **own)
    assert not set(stray) & set(found)
    assert (found["NCCL_DEBUG"], found["NCCL_IB_HCA"]) == ("INFO", "mlx5")
    assert found["NCCL_SOCKET_IFNAME"] == "lo"  # all ranks are on this node
    assert found["CUDA_DEVICE_MAX_CONNECTIONS"] == found["TORCH_NCCL_HIGH_PRIORITY"] == "1"


@pytest.mark.parametrize("node", ["0", "1", "00", "001"])
def test_ranks_are_numbered_in_the_order_of_nodes(tmp_path: Path, node: str) -> None:
    """torchrun sorts nodes by their addresses, and ranks meet on the first."""
    plan = gpu_plan(gpus=16, preset="ddp")
    own = {"MACHINE_RANK": node, "MAIN_IP": "gpu-9", "NCCL_SOCKET_IFNAME": "ib0"}
    found = ranks_environment(tmp_path, plan, **own)
    assert found["PET_LOCAL_ADDR"] == ("gpu-9" if int(node) == 0 else "~node00001")
    assert found["NCCL_SOCKET_IFNAME"] == "ib0" and "GLOO_SOCKET_IFNAME" not in found


@pytest.mark.parametrize("node", ["2", "-1", "first", "1.5"])
def test_a_node_that_the_plan_does_not_have_is_refused_at_once(tmp_path: Path, node: str) -> None:
    """It would wait ten minutes for others that do not expect it."""
    own = {"MACHINE_RANK": node, "MAIN_IP": "gpu-9"}
    with pytest.raises(subprocess.CalledProcessError) as refused:
        ranks_environment(tmp_path, gpu_plan(gpus=16, preset="ddp"), **own)
    assert refused.value.returncode == 2
    assert refused.value.stderr == f"error: MACHINE_RANK is '{node}'; legal: 0 to 1\n"


@pytest.mark.parametrize("port", ["abc", "70000", "80"])
def test_a_port_that_cannot_be_is_refused_at_once(tmp_path: Path, port: str) -> None:
    with pytest.raises(subprocess.CalledProcessError) as refused:
        ranks_environment(tmp_path, gpu_plan(gpus=8, preset="ddp"), MAIN_PORT=port)
    assert refused.value.stderr == f"error: MAIN_PORT is '{port}'; legal: 1024 to 65535\n"


def test_a_second_launch_in_a_folder_is_refused(tmp_path: Path) -> None:
    with (tmp_path / ".launch-0.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(subprocess.CalledProcessError) as refused:
            ranks_environment(tmp_path, gpu_plan(gpus=8, preset="ddp"))
    assert refused.value.returncode == 2
    assert refused.value.stderr.startswith(f"error: another launch trains in {tmp_path}; ")
    assert ranks_environment(tmp_path, gpu_plan(gpus=8, preset="ddp"))


@pytest.mark.slow
def test_a_rank_that_no_supervisor_started_has_the_settings_when_torch_reads_them() -> None:
    """launch.sh cannot know the torch of the machine that it will run on."""
    code = (
        "import sys; from workbench.engine import worker\n"
        "assert 'torch' not in sys.modules\n"
        "sys.argv = ['worker']; worker.main()\n"
        "import torch; print(torch._C._accelerator_getAllocatorSettings())"
    )
    taken = {*ALLOCATOR, "ACCELERATE_USE_CPU"}
    given = {name: value for name, value in os.environ.items() if name not in taken}
    done = subprocess.run(
        [sys.executable, "-c", code], env=given, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == allocator_settings(version("torch"))
