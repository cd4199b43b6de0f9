"""Offload to host memory: bounded staging, the share that is taken, faults that `verify` finds."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import pytest
import torch

from tests.parallel.small import GPT, plan
from tests.parallel.test_mutations import failure_of
from workbench.copy_stream import CopyStream
from workbench.engine.measure.allocator_memory import CpuMemoryMeter
from workbench.engine.optimizer.mixed_precision_optimizer import MixedPrecisionOptimizer
from workbench.engine.session import Session
from workbench.engine.verify.equivalence import verify
from workbench.engine.verify.forked_ranks import run_ranks
from workbench.parallel.data.offload import host_staging
from workbench.parallel.data.offload.host_arena import host_zeros
from workbench.parallel.data.offload.host_staging import HostStaging
from workbench.parallel.data.offload.offloaded_grads import OffloadedGrads
from workbench.parallel.data.offload.zero_offload import HostShards
from workbench.parallel.mesh import build_mesh
from workbench.plan.resolved_plan import ResolvedPlan

CPU = torch.device("cpu")
OFFLOAD = {
    "strategy.data.zero": 2,
    "strategy.data.reduce": "microbatch",
    "strategy.data.offload": "optimizer",
    "strategy.data.bucket_mib": 0.01,
}


def test_torchs_allocator_does_not_see_host_memory() -> None:
    def measured(rank: int) -> tuple[int, int]:
        meter, peaks = CpuMemoryMeter(), []
        for zeros in (torch.zeros, lambda n: host_zeros(n, torch.float32, CPU)):
            meter.start()
            x = zeros(2**20)
            assert float(x.add_(1).sum()) == 2**20
            peaks.append(meter.stop().peak)
            del x
        return peaks[0], peaks[1] - peaks[0]

    ((torchs, ours),) = run_ranks(1, measured)
    assert torchs >= 4 * 2**20 and ours < 2**16


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_staging_rounds_what_is_larger_than_its_buffers(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_staging, "STAGING_BYTES", 256)
    staging = HostStaging(CPU, CopyStream(CPU))
    assert [x.nbytes for x in staging.buffers] == [256, 256]
    master = torch.randn(1000)
    device, back = torch.zeros(1000, dtype=dtype), torch.zeros(1000)
    staging.to_device(device, master)
    staging.to_host(back, device)
    assert torch.equal(device, master.to(dtype)) and torch.equal(back, device.float())


def shares(made: ResolvedPlan, rank: int) -> tuple[float, float]:
    """(share of the elements whose states are on the host, the largest bucket's share)."""
    store = Session.build(made, build_mesh(made, rank), CPU).part.store
    buckets = [bucket for own in store.buckets.values() for bucket in own]
    sizes = [bucket.params.layout.numel for bucket in buckets]
    taken = sum(size for size, bucket in zip(sizes, buckets) if bucket.on_host)
    return taken / sum(sizes), max(sizes) / sum(sizes)


@pytest.mark.parametrize("ratio", [0.2, 0.5, 0.9, 1.0])
def test_the_host_takes_the_buckets_nearest_to_the_ratio(ratio: float) -> None:
    made = plan(1, 1, 2, shape=GPT, changes={**OFFLOAD, "strategy.data.offload_ratio": ratio})
    resolved = made.resolve()
    for taken, largest in run_ranks(2, lambda rank: shares(resolved, rank)):
        assert taken == pytest.approx(ratio, abs=largest / 2 + 1e-9)


def test_a_bucket_goes_up_while_the_next_is_stepped(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    def noted(kind: str, original: Any) -> Any:
        def called(*arguments: Any) -> Any:
            events.append(kind)
            return original(*arguments)

        return called

    made = plan(1, 1, 1, shape=GPT, microbatches=1, changes=OFFLOAD).resolve()

    def uploads(rank: int) -> tuple[list[str], int]:
        session = Session.build(made, build_mesh(made, rank), CPU)
        update, store = MixedPrecisionOptimizer._update, HostShards.store_params
        monkeypatch.setattr(MixedPrecisionOptimizer, "_update", noted("update", update))
        monkeypatch.setattr(HostShards, "store_params", noted("upload", store))
        tokens = torch.randint(257, (1, 2, 16))
        session.step(0, tokens, tokens)
        host = session.part.store.host
        assert host is not None
        return events, len(host.names)

    ((seen, buckets),) = run_ranks(1, uploads)
    assert buckets > 2 and seen.count("upload") == buckets
    assert [kind for kind, _ in groupby(seen)] == ["update", "upload"] * buckets


def forget_former_microbatches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OffloadedGrads, "_start_copy_from_host", lambda self: None)


def keep_a_gradient_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def stays(self: OffloadedGrads, leaving: torch.Tensor) -> Any:
        self._on_host = True
        return self._copies.copied()

    monkeypatch.setattr(OffloadedGrads, "_start_copy_to_host", stays)


def leave_parameters_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostShards, "store_params", lambda self, params: None)


@pytest.mark.parametrize(
    "fault",
    [forget_former_microbatches, keep_a_gradient_on_the_device, leave_parameters_as_they_were],
)
def test_a_fault_of_offload_is_found(fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    assert failure_of(verify(plan(1, 1, 2, shape=GPT, microbatches=2, changes=OFFLOAD)))
