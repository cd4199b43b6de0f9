"""The child that asks torch of the GPUs: over gloo, and on a fake torch.cuda."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from workbench.engine import gpu_check
from workbench.engine.verify.forked_ranks import RankError


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "MESSAGE_BYTES", 2**16)


def test_bus_bandwidth_counts_what_a_rank_sends_and_receives() -> None:
    found = gpu_check.all_reduce_bandwidth(2, 0.05, "cpu")
    assert found["gpus"] == 2 and found["bytes"] == 2**16 and found["calls"] >= 1
    assert 0 < found["bus_gbs"] < 1000


def test_bus_bandwidth_is_that_of_a_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of n ranks each sends 2 (n - 1) / n of the message, as NCCL's tests count it."""
    monkeypatch.setattr(gpu_check, "run_ranks", lambda world, *_: [(10, 2.0)] * world)
    found = {n: gpu_check.all_reduce_bandwidth(n, 1.0)["bus_gbs"] for n in (2, 4, 8)}
    per_second = 5 * gpu_check.MESSAGE_BYTES / 1e9
    assert found == pytest.approx({2: per_second, 4: 1.5 * per_second, 8: 1.75 * per_second})


def test_one_rank_has_no_bandwidth() -> None:
    assert gpu_check.all_reduce_bandwidth(1, 0.01, "cpu")["bus_gbs"] == 0


def test_a_sum_that_is_wrong_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """P2P behind an IOMMU can leave a message as it was."""
    monkeypatch.setattr(dist, "all_reduce", lambda message, op=None: None)
    with pytest.raises(RankError, match="16384 of 16384 ones added up to other than world size"):
        gpu_check.all_reduce_bandwidth(2, 0.01, "cpu")


def fake_cuda(patch: pytest.MonkeyPatch, **over: Any) -> None:
    """Two GPUs, of which the second has no access to the first."""
    properties = SimpleNamespace(
        name="NVIDIA H100 80GB HBM3", uuid="a", major=9, minor=0, total_memory=85_000_000_000
    )
    functions: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "get_device_properties": lambda index: properties,
        "can_device_access_peer": lambda one, other: (one, other) == (0, 1),
    }
    for name, function in (functions | over).items():
        patch.setattr(torch.cuda, name, function)
    patch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 5))
    ones = torch.ones
    patch.setattr(torch, "ones", lambda *sizes, device: ones(*sizes))


def test_facts_hold_versions_gpus_and_p2p_access(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cuda(monkeypatch)
    found = gpu_check.facts()
    assert (found["nccl"], found["torch"]) == ("2.27.5", torch.__version__)
    assert [gpu["capability"] for gpu in found["gpus"]] == ["9.0", "9.0"]
    assert found["p2p"] == [[False, True], [False, False]]


def test_a_gpu_that_runs_no_kernel_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cuda(monkeypatch)

    def no_image(*sizes: int, device: str) -> None:
        raise RuntimeError("CUDA error: no kernel image is available\nmore words")

    monkeypatch.setattr(torch, "ones", no_image)
    with pytest.raises(ValueError, match=r"^GPU 0 \(NVIDIA H100 80GB HBM3\): .* is available$"):
        gpu_check.facts()


def test_a_torch_without_gpus_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cuda(monkeypatch, is_available=lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(ValueError, match="is a CPU build"):
        gpu_check.facts()
