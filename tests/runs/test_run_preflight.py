"""What this machine cannot run is refused before anything is written, by field, with numbers and
what is legal.
"""

import hashlib
import os
import socket
import subprocess
import sys
from dataclasses import replace
from os import stat_result
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import Ask
from tests.machine import stub_nvml
from workbench.checkpoint.checksums import refuse_damaged
from workbench.checkpoint.manifest import VERSION, manifest_text
from workbench.checkpoint.resume_point import checkpoint_meta
from workbench.errors import PlanError
from workbench.machine.attached import Attached
from workbench.machine.nvml_devices import NvmlDevice
from workbench.plan.model.parameter_count import parameters
from workbench.plan.schema import Plan
from workbench.planner import estimate
from workbench.runs import preflight, start
from workbench.runs.launch import accelerate_command, checked_launch
from workbench.runs.launch.free_memory import free_gpu_bytes, least_bytes, least_host_bytes
from workbench.runs.store import run_directory
from workbench.runs.store.run_state import first_state, write_state
from workbench.units import GIB


def messages(plan: Plan, **more: Any) -> list[Any]:
    return [str(problem) for problem in preflight(plan, **more)]


def test_a_plan_for_this_machine_may_run(plan: Plan, tmp_path: Path) -> None:
    assert messages(plan, root=tmp_path) == []


def test_gpus_that_are_not_attached_are_refused(plan: Plan) -> None:
    told = messages(
        plan.replace(**{"cluster.gpu": "h100-sxm-80gb", "cluster.gpus": 4}), root="/tmp"
    )
    assert len(told) == 1 and told[0].startswith(
        "cluster.gpu: 4 x h100-sxm-80gb needs cuda devices; here: CPU"
    )
    assert "cluster.gpu: local" in told[0]


def machine(monkeypatch: pytest.MonkeyPatch, found: Attached, free: int = 80 * 2**30) -> None:
    monkeypatch.setattr(sys.modules["workbench.runs.launch.preflight"], "attached", lambda: found)
    monkeypatch.setattr("workbench.runs.launch.free_memory.free_gpu_bytes", lambda ranks: free)


def h100s(gpus: int) -> Plan:
    return Plan.of("tiny", gpu="h100-sxm-80gb", gpus=gpus, strategy="ddp")


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine(monkeypatch, Attached("cuda", 2, "NVIDIA H100 80GB HBM3", 80 * 2**30, 8))
    (told,) = messages(h100s(4), root=tmp_path)
    assert told.startswith("cluster.gpus: is 4, more than is attached") and "from 1 to 2" in told
    assert messages(h100s(2), root=tmp_path) == []


def test_a_smaller_gpu_is_not_the_planned_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine(monkeypatch, Attached("cuda", 2, "NVIDIA A100 40GB", 40 * 2**30, 8))
    (told,) = messages(h100s(2), root=tmp_path)
    assert told.startswith("cluster.gpu: h100-sxm-80gb has") and "40.0 GiB" in told


def test_another_model_of_the_same_memory_is_not_the_planned_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine(monkeypatch, Attached("cuda", 2, "NVIDIA A100-SXM4-80GB", 80 * 2**30, 8))
    for force in (False, True):  # an estimate of another GPU is of another run, whatever the memory
        (told,) = messages(h100s(2), root=tmp_path, force=force)
        assert (
            told.startswith("cluster.gpu: is h100-sxm-80gb")
            and "A100-SXM4-80GB" in told
            and "local" in told
        )
    figures = (
        h100s(2).resolve().gpu.model_copy(update={"name": "mine"}).model_dump(exclude_none=True)
    )
    assert messages(h100s(2).replace(**{"cluster.gpu": figures}), root=tmp_path) == []


def test_several_nodes_are_for_export(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine(monkeypatch, Attached("cuda", 8, "NVIDIA H100 80GB HBM3", 80 * 2**30, 8))
    (told,) = messages(h100s(16), root=tmp_path)
    assert told.startswith("cluster.nodes: is 2") and "export" in told


def test_what_this_version_cannot_run_is_refused_by_field(plan: Plan, tmp_path: Path) -> None:
    other = plan.replace(**{"strategy.stack": "torchtitan"})
    assert any("strategy.stack" in told for told in messages(other, root=tmp_path))


def test_a_missing_corpus_is_refused(plan: Plan, tmp_path: Path) -> None:
    (told,) = messages(plan.replace(**{"corpus.source": str(tmp_path / "none")}), root=tmp_path)
    assert told.startswith("corpus.source") and "does not exist" in told


def test_a_folder_that_may_not_be_entered_is_told_by_field(
    plan: Plan, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real = os.stat

    def stat(path: Path | str, *more: Any, **words: Any) -> stat_result:
        if "locked" in str(path):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *more, **words)

    monkeypatch.setattr("os.stat", stat)
    told = messages(
        plan.replace(**{"corpus.source": str(tmp_path / "locked" / "a.txt")}), root=tmp_path
    )
    assert len(told) == 1 and told[0].startswith("corpus.source") and "may not be read" in told[0]


def test_a_conversation_may_be_shorter_than_a_sequence(plan: Plan, tmp_path: Path) -> None:
    chats = tmp_path / "a.jsonl"
    chats.write_text('{"prompt": "a", "completion": "b"}\n')
    assert messages(plan.replace(**{"corpus.source": str(chats)}), root=tmp_path) == []


def test_a_corpus_shorter_than_a_sequence_is_refused(plan: Plan, tmp_path: Path) -> None:
    text = tmp_path / "short.txt"
    short = plan.replace(
        **{"corpus.source": str(text), "corpus.holdout": 0.0, "training.sequence_length": 16}
    )
    text.write_text("x")
    (told,) = messages(short, root=tmp_path)
    assert told.startswith("corpus.source") and "2 tokens" in told and "16 needs 17" in told
    text.write_text("x" * 16)
    assert messages(short, root=tmp_path) == []


@pytest.mark.parametrize("below", ["file", "file/deeper/runs"])
def test_an_unwritable_root_is_refused_and_nothing_is_written(
    plan: Plan, tmp_path: Path, below: str
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PlanError, match="runs cannot be written in"):
        start(plan, root=tmp_path / below)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus.txt", "file"]


def test_a_root_that_turns_out_unwritable_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PlanError, match="root: runs cannot be written in"):
        run_directory.create(tmp_path / "file", "x", lambda folder, final: None)


def test_a_failure_while_filling_leaves_nothing(tmp_path: Path) -> None:
    def fill(folder: Path, final: Path) -> None:
        (folder / "plan.yaml").write_text("half")
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        run_directory.create(tmp_path, "x", fill)
    assert list(tmp_path.iterdir()) == []


def test_runs_of_one_second_get_names_of_their_own(tmp_path: Path) -> None:
    made = {
        run_directory.create(tmp_path, "A b/../c", lambda folder, final: None).name
        for _ in range(5)
    }
    assert len(made) == 5 and all("a-b-c" in name and "/" not in name for name in made)


def test_a_port_in_use_is_refused(plan: Plan, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        (told,) = messages(plan, root=tmp_path, port=port)
        assert told.startswith(f"port: port = {port} is in use")
        with pytest.raises(PlanError, match="is in use"):
            start(plan, root=tmp_path / "runs", port=port)
    assert not (tmp_path / "runs").exists()
    assert messages(plan, root=tmp_path, port=port) == []
    assert "outside 1024..65535" in messages(plan, root=tmp_path, port=80)[0]


def test_a_full_disk_is_refused_unless_forced(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=2**20))
    (told,) = messages(plan.replace(**{"checkpoint.every": 5}), root=tmp_path)
    assert told.startswith("checkpoint.keep: 3 checkpoints") and "0.00 GiB are free" in told
    assert messages(plan, root=tmp_path, force=True) == []
    (told,) = messages(plan, root=tmp_path)
    assert (
        told.startswith("root: the logs of a run take about 0.06 GiB") and "checkpoint" not in told
    )


def test_a_gpu_that_others_have_filled_is_refused_unless_forced(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine(monkeypatch, Attached("cuda", 2, "NVIDIA H100 80GB HBM3", 80 * 2**30, 8), free=2**20)
    (told,) = messages(h100s(2), root=tmp_path)
    assert (
        told.startswith("cluster.gpus: weights, gradients and optimizer take at least")
        and "0.0 GiB are free" in told
    )
    assert messages(h100s(2), root=tmp_path, force=True) == []


def test_the_visible_gpu_with_the_least_free_memory_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    free = zip(stub_nvml.gpus(4), [5.0, 30.0, 20.0, 40.0])
    stub_nvml.install(monkeypatch, [replace(gpu, free_gib=gib) for gpu, gib in free])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert free_gpu_bytes(2) == 5 * GIB
    for visible in ("3,1,0", "GPU-d,GPU-b", "3,1,7,0"):  # of the last CUDA takes two
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert free_gpu_bytes(2) == 30 * GIB


def test_gpus_that_cannot_be_used_are_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, plan: Plan, tmp_path: Path
) -> None:
    why = "2 x NVIDIA H100 80GB HBM3 here, but torch 2.11.0 is a build without CUDA"
    found = Attached("cpu", 8, "CPU, 2 cores", 2**34, 2, why, unusable=True)
    machine(monkeypatch, found)
    monkeypatch.setattr("workbench.plan.resolution.attached", lambda: found)
    (told,) = messages(h100s(2), root=tmp_path)
    assert told.startswith(f"cluster.gpu: is h100-sxm-80gb, and {why}; ") and "doctor" in told
    with pytest.raises(PlanError, match=r"cluster.gpu: is local, and 2 x NVIDIA H100"):
        messages(plan, root=tmp_path)


def test_one_unlike_gpu_among_those_of_the_plan_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    h100, a100 = (
        NvmlDevice(name, "", 80 * GIB, 80 * GIB) for name in (stub_nvml.H100, stub_nvml.A100)
    )
    found = Attached("cuda", 2, h100.name, 80 * GIB, 8, gpus=(h100, a100))
    machine(monkeypatch, found)
    (told,) = messages(h100s(2), root=tmp_path)
    assert "another model than is attached" in told and stub_nvml.A100 in told


def test_the_least_that_a_rank_holds() -> None:
    def least(**changes: Any) -> int:
        return least_bytes(h100s(4).replace(**changes).resolve())

    whole = parameters(h100s(4).resolve().shape).total
    sgd = {"training.optimizer.name": "sgd"}
    assert least() == 18 * whole  # bf16: 2, gradients 4, moments 8, master 4
    assert least(**{"strategy.precision": "fp32"}) == 16 * whole
    assert least(**sgd) == 14 * whole
    assert least(**{"strategy.tensor.size": 2}) == 9 * whole
    assert least(**{"training.optimizer.moments": "bf16"}) == 14 * whole
    assert least(**sgd, **{"training.optimizer.beta1": 0.0}) == 10 * whole
    pure = {"training.optimizer.master": "none", "training.optimizer.moments": "bf16"}
    assert least(**pure, **{"strategy.gradient_dtype": "bf16"}) == 8 * whole


def test_an_offload_that_the_host_cannot_hold_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine(monkeypatch, Attached("cuda", 2, "NVIDIA H100 80GB HBM3", 80 * 2**30, 8))
    plan = h100s(2).replace(
        model="gpt3-6.7b",
        **{
            "strategy.data.zero": 2,
            "strategy.data.offload": "optimizer",
            "strategy.gradient_dtype": "fp32",
        },
    )
    need = least_host_bytes(plan.resolve()) * 2
    assert need == 16 * parameters(plan.resolve().shape).total  # 8 + 4 of Adam, 4 of a gradient
    for free, refused in ((need - 1, True), (need, False)):
        monkeypatch.setattr("workbench.runs.launch.free_memory._free_host_bytes", lambda f=free: f)
        refusals = messages(plan, root=tmp_path)
        assert len(refusals) == refused
        if refused:
            assert refusals[0].startswith("strategy.data.offload: weights, gradients and optimizer")
            assert f"{need / GIB:.1f} GiB of the host, for 2 ranks" in refusals[0]


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("offload", ["none", "optimizer", "parameters"])
@pytest.mark.parametrize(
    "optimizer", [{}, {"moments": "bf16", "master": "none"}, {"name": "sgd", "beta1": 0.0}]
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_least_is_below_the_estimate_of_what_stays_from_step_to_step(
    zero: int, offload: str, optimizer: dict[str, Any], precision: str
) -> None:
    changes = {f"training.optimizer.{name}": value for name, value in optimizer.items()}
    changes |= {
        "strategy.precision": precision,
        "strategy.data.zero": zero,
        "strategy.data.offload": offload,
    }
    try:
        plan = h100s(4).replace(**changes).resolve()
    except PlanError:
        pytest.skip("no legal plan")
    rows = estimate(plan).memory
    rows = rows[(rows.moment == "before_optimizer") & (rows.tier == "device")]
    rows = rows[rows.category.isin(["parameters", "gradients", "optimizer", "master"])]
    estimated = rows.groupby("rank").bytes.sum().max()
    assert least_bytes(plan) <= estimated * 1.001
    if offload == "none" and zero < 2:
        assert least_bytes(plan) >= estimated * 0.95


def test_every_problem_is_told_at_once(plan: Plan, tmp_path: Path) -> None:
    bad = plan.replace(
        **{
            "cluster.gpu": "h100-sxm-80gb",
            "corpus.source": "/none",
            "training.optimizer.moments": "int8",
        }
    )
    assert {problem.field for problem in preflight(bad, root=tmp_path)} >= {
        "cluster.gpu",
        "corpus.source",
        "training.optimizer.moments",
    }


def test_the_command_is_accelerate_launch(plan: Plan, tmp_path: Path) -> None:
    full = plan.resolve()
    folder = tmp_path / "a run; rm -rf"
    command = accelerate_command.compose(full, folder, 29999, accelerate_command.Recipe())
    assert command.argv[:5] == [
        sys.executable,
        "-P",
        "-m",
        "accelerate.commands.launch",
        "--config_file",
    ]
    assert command.argv[5] == str(folder / "accelerate.yaml")
    assert command.argv[-3:] == ["-m", "workbench.engine.worker", str(folder / "plan.yaml")]
    assert (
        command.env["ACCELERATE_USE_CPU"] == "true" and command.env["OMP_WAIT_POLICY"] == "passive"
    )
    assert command.env["PYTHONSAFEPATH"] == "1"
    assert int(command.env["OMP_NUM_THREADS"]) >= 1


def test_another_launch_does_not_leak_in(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stray = {"RANK", "TORCHELASTIC_RUN_ID", "ACCELERATE_USE_FSDP", "ACCELERATE_MIXED_PRECISION"}
    for name in stray:
        monkeypatch.setenv(name, "3")
    command = accelerate_command.compose(
        plan.resolve(), tmp_path, 29999, accelerate_command.Recipe()
    )
    assert stray <= set(command.unset)


def test_the_command_of_a_run_on_gpus_shows_what_steers_nccl_and_the_allocator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NCCL_IB_HCA", "mlx5")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    plan = Plan.of("llama-3-8b", gpu="h100-sxm-80gb", gpus=8, strategy="megatron-tp").resolve()
    shown = accelerate_command.compose(plan, tmp_path, 29999, accelerate_command.Recipe()).env
    assert (shown["NCCL_IB_HCA"], shown["NCCL_DEBUG"]) == ("mlx5", "INFO")
    assert shown["TORCH_NCCL_HIGH_PRIORITY"] == shown["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert shown["PYTORCH_ALLOC_CONF"].startswith("expandable_segments:True")
    assert shown["TORCH_FR_BUFFER_SIZE"] == "2000"


def test_what_the_user_says_of_the_flight_recorder_under_its_former_name_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch heeds the new name where both are set."""
    monkeypatch.setenv("TORCH_NCCL_TRACE_BUFFER_SIZE", "50")
    plan = Plan.of("llama-3-8b", gpu="h100-sxm-80gb", gpus=8, strategy="ddp").resolve()
    shown = accelerate_command.compose(plan, tmp_path, 29999, accelerate_command.Recipe()).env
    assert shown["TORCH_NCCL_TRACE_BUFFER_SIZE"] == "50" and "TORCH_FR_BUFFER_SIZE" not in shown


@pytest.mark.parametrize("left", [7, 0, 9, None])
def test_a_checkpoint_whose_file_is_cut_is_refused_before_launch_by_its_name(
    plan: Plan, tmp_path: Path, left: int | None
) -> None:
    made = plan.resolve().replace(**{"checkpoint.load": str(tmp_path)})
    files = [{"file": "rank00000.safetensors", "bytes": 8, "sha256": "", "tensors": []}]
    body = {"version": VERSION, "meta": checkpoint_meta(made.resolve(), 1), "files": files}
    (tmp_path / "manifest.json").write_text(manifest_text(body))
    file = tmp_path / "rank00000.safetensors"
    file.write_bytes(bytes(8))
    assert not any("checkpoint" in told for told in messages(made, root=tmp_path))
    file.unlink() if left is None else file.write_bytes(bytes(left))
    why = (
        "cannot be read: No such file" if left is None else f"is damaged: {left} bytes instead of 8"
    )
    assert any(f"checkpoint.load: {file} {why}" in told for told in messages(made, root=tmp_path))


def test_a_checkpoint_with_a_flipped_byte_is_refused_before_launch_by_its_file(
    ask: Ask, plan: Plan, tmp_path: Path
) -> None:
    full, content = plan.resolve(), bytearray(range(256))
    at = tmp_path / "step-00000001"
    at.mkdir()
    sha256 = hashlib.sha256(content).hexdigest()
    files = [{"file": "rank00000.safetensors", "bytes": 256, "sha256": sha256, "tensors": []}]
    (at / "manifest.json").write_text(
        manifest_text({"version": VERSION, "meta": checkpoint_meta(full, 1), "files": files})
    )
    (at / "rank00000.safetensors").write_bytes(content)
    told: list[Any] = []
    refuse_damaged(at, told.append)
    assert told == ["checking checkpoint, 0 of 0 MiB"]
    content[100] ^= 1
    (at / "rank00000.safetensors").write_bytes(content)
    (tmp_path / "plan.yaml").write_text(full.to_yaml())
    code, _, err = ask(
        "run", tmp_path / "plan.yaml", "--resume", at, "--root", tmp_path / "runs", "--json"
    )
    assert (
        code == 2
        and "rank00000.safetensors is damaged: its content does not match its checksum" in err
    )
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("is_run", [True, False])
def test_what_a_killed_run_was_writing_goes_when_another_goes_on_from_it(
    plan: Plan, tmp_path: Path, is_run: bool
) -> None:
    done, half = (
        tmp_path / "checkpoints" / name for name in ("step-00000001", "step-00000002.writing-abc")
    )
    done.mkdir(parents=True)
    half.mkdir()
    if is_run:
        write_state(tmp_path, first_state(1, 2))
    checked_launch._clear_killed_run(plan.replace(**{"checkpoint.load": str(done)}))
    assert done.is_dir() and half.exists() is not is_run


@pytest.mark.parametrize(
    "module,allowed", [("launch.parent_death", ""), ("launch.supervisor", ""), ("run", "pydantic")]
)
def test_nothing_slow_is_imported(module: str, allowed: str) -> None:
    code = (
        f"import sys, workbench.runs.{module}; print(*{{'torch', 'pandas', 'pydantic'}} & "
        f"set(sys.modules))"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert told.returncode == 0 and set(told.stdout.split()) <= set(allowed.split()), told.stderr


def test_a_run_directory_is_its_owners_alone(tmp_path: Path) -> None:
    folder = run_directory.create(tmp_path, "a run", lambda draft, final: None)
    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_base_names_its_own_field(plan: Plan, tmp_path: Path) -> None:
    def said(base: Path) -> str:
        (found,) = messages(plan.replace(**{"finetune.base": str(base)}), root=tmp_path)
        return str(found)

    assert said(tmp_path / "none").startswith(f"finetune.base: '{tmp_path}/none' does not exist; l")
    (tmp_path / "config.json").write_text('{"model_type": "zzz"}')
    assert said(tmp_path).startswith(
        f"finetune.base: '{tmp_path}/config.json' has model_type 'zzz'"
    )
    meta = checkpoint_meta(plan.replace(**{"finetune.lora.rank": 2}).resolve(), 3)
    body = {"version": VERSION, "meta": meta, "files": []}
    (tmp_path / "manifest.json").write_text(manifest_text(body))
    assert said(tmp_path).startswith(f"finetune.base: '{tmp_path}' holds adapters alone; legal: th")
    (tmp_path / "manifest.json").write_text("{}")
    assert "finetune.base" in said(tmp_path) and "checkpoint.load" not in said(tmp_path)
    latest = tmp_path / "run" / "checkpoints" / "step-00000003"
    latest.mkdir(parents=True)
    (latest / "manifest.json").write_text("{}")
    assert said(tmp_path / "run").endswith(f"not one of its checkpoints; legal: '{latest}'")


def test_weights_are_fine_tuned_as_a_base_and_no_checkpoint(plan: Plan, tmp_path: Path) -> None:
    weights = tmp_path / "model.gguf"
    weights.touch()
    tuned = plan.replace(**{"finetune.lora.rank": 2, "checkpoint.load": str(weights)})
    (said,) = messages(tuned, root=tmp_path)
    assert said.startswith("checkpoint.load: ") and "with the weights as finetune.base" in said
