"""Measured points of collectives, by kind, group size, dtype and message size."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist

from workbench.engine.calibrate.local_points import Point, stored_dtype
from workbench.engine.calibrate.measured_sizes import CalibrationSurvey
from workbench.engine.precision import DTYPES
from workbench.machine.calibration_file import Dtype, Kind
from workbench.parallel.async_collectives import (
    all_gather_async,
    reduce_scatter_async,
    run_collective,
)
from workbench.parallel.context.context_collectives import start_ring_transfer, wait_ring_transfer
from workbench.parallel.data.data_collectives import local_shard
from workbench.parallel.mesh import MeshAxis
from workbench.parallel.pipeline.stage_transfers import start_recv, start_send
from workbench.parallel.tensor.tensor_collectives import all_reduce

SUMS = ("all_reduce", "reduce_scatter", "reduce")
"""Kinds that reduce; the cost of the others does not depend on the dtype."""

POINT_TO_POINT = ("send", "exchange")


def collective_points(survey: CalibrationSurvey, device: torch.device) -> Iterator[Point]:
    """Collectives over all ranks, and concurrently over pairs of neighbours."""
    world = dist.get_world_size()
    dtypes = tuple(dict.fromkeys(stored_dtype(dtype) for dtype in survey.dtypes))
    for size in sorted({2, world}) if world > 1 else []:
        axis = _axis(size, device)
        for kind in (k for k in survey.kinds if k not in POINT_TO_POINT or size == 2):
            for dtype in dtypes if kind in SUMS else dtypes[:1]:
                for size_bytes in survey.messages:
                    yield _point(kind, dtype, size_bytes, axis, device)


def _axis(size: int, device: torch.device) -> MeshAxis:
    """This rank's group of `size` neighbours; every rank takes part in creating all groups."""
    rank, world = dist.get_rank(), dist.get_world_size()
    backend = "nccl" if device.type == "cuda" else "gloo"
    members = [tuple(range(first, first + size)) for first in range(0, world, size)]
    groups = [dist.new_group(list(ranks), backend=backend) for ranks in members]
    mine = rank // size
    return MeshAxis("calibration", size, rank % size, members[mine], groups[mine])


def _point(kind: Kind, dtype: Dtype, size: int, axis: MeshAxis, device: torch.device) -> Point:
    elements = max(axis.size, size // DTYPES[dtype].itemsize // axis.size * axis.size)
    whole = torch.zeros(elements, dtype=DTYPES[dtype], device=device)
    part = torch.zeros(elements // axis.size, dtype=DTYPES[dtype], device=device)
    labels = {"kind": kind, "group": axis.size, "dtype": dtype, "bytes": whole.nbytes}
    between = _layer(device) if device.type == "cpu" else None
    return Point("collectives", labels, _call(kind, whole, part, axis), "together", between)


def _layer(device: torch.device) -> Callable[[], object]:
    """Two or three milliseconds of GEMM, as between the collectives of two layers.

    Back to back, collectives find gloo's threads awake and all ranks synchronised; between layers
    they find neither, and cost a multiple.
    """
    x, weight = torch.ones(512, 512, device=device), torch.ones(512, 512, device=device)
    return lambda: torch.mm(x, weight)


def _call(
    kind: Kind, whole: torch.Tensor, part: torch.Tensor, axis: MeshAxis
) -> Callable[[], object]:
    group = axis.group
    if kind == "all_reduce":
        return lambda: all_reduce(whole, axis)
    if kind == "all_gather":
        return lambda: all_gather_async(whole, part, axis)()
    if kind == "reduce_scatter":
        own = local_shard(whole, axis)  # in place, as gradients in flat buckets are
        return lambda: reduce_scatter_async(own, whole, axis)()
    if kind == "all_to_all":
        received = torch.empty_like(whole)
        return lambda: dist.all_to_all_single(received, whole, group=group)
    if kind == "broadcast":  # each is the root in turn, as in SUMMA
        roots = itertools.cycle(range(axis.size))
        return lambda: run_collective(
            partial(dist.broadcast, group=group, group_src=next(roots)), whole
        )
    if kind == "reduce":
        ends = itertools.cycle(range(axis.size))
        return lambda: run_collective(
            partial(dist.reduce, group=group, group_dst=next(ends)), whole
        )
    if kind == "exchange":
        return lambda: wait_ring_transfer(start_ring_transfer([whole], axis))
    return lambda: _ping_pong(whole, axis)


def _ping_pong(x: torch.Tensor, axis: MeshAxis) -> None:
    """Even ranks send to the next and receive back: one way is half of the time."""
    peer = axis.index ^ 1
    if peer >= axis.size:
        return
    for sender in (0, 1):
        mine = axis.index % 2 == sender
        (start_send if mine else start_recv)(x, peer, axis).wait()
