"""Each rank has a GPU of its own, of the plan's model, or is refused before anything is built."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from workbench.engine import worker_lifecycle
from workbench.engine.process_group import gpu_binding as gpus
from workbench.engine.verify.forked_ranks import run_ranks
from workbench.errors import PlanError
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.schema import Plan
from workbench.runs.launch.rendezvous_ports import free_port

H100 = "NVIDIA H100 80GB HBM3"


def plan(gpus: int = 2, gpu: Any = "h100-sxm-80gb") -> ResolvedPlan:
    return Plan.of("tiny", gpu=gpu, gpus=gpus, strategy="ddp").resolve()


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A node with two H100s, as torch.cuda would tell of it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    show(monkeypatch, [("a", H100), ("b", H100)])
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def show(cuda: pytest.MonkeyPatch, cards: list[tuple[str, str]]) -> None:
    """Let torch.cuda tell of GPUs with these UUIDs and names."""
    known = [SimpleNamespace(uuid=f"uuid-{uuid}", name=name) for uuid, name in cards]
    cuda.setattr(
        torch.cuda, "get_device_properties", lambda device: known[torch.device(device).index]
    )


def test_dumps_go_to_the_run_directory_unless_the_user_says_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the name of torch 2.13 or by the former one, which is heeded where it stands alone."""
    new, former = "TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"
    for name in (new, former):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(former, "/mine/rank")
    gpus._name_dumps(tmp_path)
    assert new not in os.environ
    monkeypatch.delenv(former)
    (tmp_path / "logs" / "flight_recorder_rank0").touch()
    monkeypatch.setenv(new, "")  # so that the variable is taken away after the test
    monkeypatch.delenv(new)
    gpus._name_dumps(tmp_path)
    assert os.environ[new] == str(tmp_path / "logs" / "flight_recorder_rank")
    assert not list((tmp_path / "logs").iterdir())


def joined(made: Plan, world: int = 2) -> list[str]:
    """What `join_gpus` tells each of `world` ranks of a node, which meet over TCP; "joined" where
    it lets them in.
    """
    port = str(free_port())

    def work(rank: int) -> str:
        place = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": world,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        os.environ |= {name: str(value) for name, value in place.items()}
        entered: list[Any] = []
        dist.init_process_group = lambda backend, **words: entered.append(
            (backend, words["device_id"], words["rank"])
        )
        try:
            gpus.init_gpu_process_group(made, Path())
        except PlanError as error:
            assert not entered
            return str(error)
        assert entered == [("nccl", torch.device("cuda", rank), rank)]
        return "joined"

    return run_ranks(world, work, seconds=30)


def test_ranks_with_a_gpu_each_join(cuda: pytest.MonkeyPatch) -> None:
    assert joined(plan()) == ["joined", "joined"]


def test_two_ranks_on_one_gpu_are_refused_by_name(cuda: pytest.MonkeyPatch) -> None:
    show(cuda, [("a", H100), ("a", H100)])
    for told in joined(plan()):
        assert told.startswith("cluster.gpus: ") and "ranks 0 and 1" in told and "uuid-a" in told


def test_another_model_is_refused_by_rank(cuda: pytest.MonkeyPatch) -> None:
    show(cuda, [("a", H100), ("b", "NVIDIA A100-SXM4-80GB")])
    for told in joined(plan()):
        assert (
            told.startswith("cluster.gpu: is h100-sxm-80gb")
            and "rank 1" in told
            and "A100-SXM4-80GB" in told
        )
        assert "rank 0" not in told


def test_a_gpu_written_out_has_no_name_to_compare(cuda: pytest.MonkeyPatch) -> None:
    show(cuda, [("a", "NVIDIA Something"), ("b", "NVIDIA Something")])
    figures = plan().gpu.model_copy(update={"name": "mine"}).model_dump(exclude_none=True)
    assert joined(plan(gpu=figures)) == ["joined", "joined"]


def test_fewer_gpus_than_ranks_are_refused_with_both_numbers(cuda: pytest.MonkeyPatch) -> None:
    cuda.setenv("LOCAL_RANK", "2")
    with pytest.raises(PlanError, match=r"cluster\.gpus: .* local rank 2 .* 2 GPUs"):
        gpus.bind_gpu(plan(4))


def test_unusable_cuda_is_reported_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(PlanError, match=r"cluster\.gpu: is h100-sxm-80gb, but .* CPU build"):
        gpus.bind_gpu(plan())
    monkeypatch.setattr(torch.version, "cuda", "13.0")

    def broken() -> None:
        raise RuntimeError("Found no NVIDIA driver on your system.\nPlease check")

    monkeypatch.setattr(torch.cuda, "init", broken)
    with pytest.raises(PlanError, match=r"cluster\.gpu: .* Found no NVIDIA driver"):
        gpus.bind_gpu(plan())


def test_gpus_are_checked_against_the_plan_before_accelerate_starts(
    cuda: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    def accelerator(**words: Any) -> None:
        raise AssertionError("accelerate was asked first")

    cuda.setattr(worker_lifecycle, "Accelerator", accelerator)
    cuda.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(PlanError, match=r"cluster\.gpus"):
        worker_lifecycle.join_launch(plan(), tmp_path)


def test_a_rank_says_which_gpu_it_has(cuda: pytest.MonkeyPatch) -> None:
    assert gpus.gpu_record(torch.device("cuda", 1)) == {"uuid": "uuid-b", "name": H100}
    assert gpus.gpu_record(torch.device("cpu")) is None


def test_a_rank_that_says_nothing_is_named() -> None:
    store = dist.HashStore()
    store.set_timeout(timedelta(milliseconds=50))
    own = gpus.RankGpu("host", 0, "uuid-a", H100)
    with pytest.raises(RuntimeError, match="rank 1 did not say which GPU it has"):
        gpus.check_gpus(plan(), own, store, 0, 2)
