"""Roofline of single operators: the same primitives as `roofline`, for shapes that were counted.

A rehearsal counts what a step runs, operator by operator; here each takes its time on the planned
GPU. Which of compute, memory and launch bounds it follows from Williams et al. 2009 (Roofline,
10.1145/1498765.1498785), with the host's launch as a third floor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from workbench.costmodel.compute.kernel_rates import (
    DeviceRates,
    fused_attention,
    gemm_seconds,
    peak_flops,
)
from workbench.machine.hardware import GPU
from workbench.plan.optimizer_state import DTYPE_BYTES

Kind = Literal["gemm", "attention", "memory"]
Phase = Literal["forward", "recompute", "backward", "optimizer"]
Bound = Literal["compute", "memory", "launch"]
PHASES: tuple[Phase, ...] = ("forward", "recompute", "backward", "optimizer")
COMPUTE_PHASES = PHASES[:3]
"""Phases that an estimate calls compute; `optimizer` is what a step does once."""


@dataclass(frozen=True)
class Operator:
    """One operator at one shape.

    Attributes:
        name: As torch calls it.
        kind: What prices it.
        phase: Part of the step.
        dims: GEMM: batch, M, N, K. Attention: batch, heads, queries, keys, head_dim. Of others, of
            their largest tensor.
        dtype: Of the operands.
        flops: Multiplications and additions; 0 of memory-bound operators.
        read: Bytes of operands, each once.
        written: Bytes of results.
        backward: Whether attention is the backward kernel.
        module: Class of the module that runs it; empty outside of all.
        primitives: Elementwise operators and reductions that it holds; GEMMs are not counted.
        primitive_bytes: What these would move, each by itself; None: what it moves itself.
    """

    name: str
    kind: Kind
    phase: Phase
    dims: tuple[int, ...]
    dtype: str
    flops: int
    read: int
    written: int
    backward: bool = False
    module: str = ""
    primitives: int = 1
    primitive_bytes: int | None = None

    @property
    def bytes(self) -> int:
        """Bytes moved, each operand and result once."""
        return self.read + self.written

    @property
    def intensity(self) -> float:
        """Arithmetic intensity, FLOPs per byte."""
        return self.flops / self.bytes if self.bytes else 0.0


@dataclass(frozen=True)
class OperatorTime:
    """Operators of one shape in a step, priced on a GPU.

    Attributes:
        operator: The operator.
        rank: Rank that ran it.
        count: How often in a step.
        seconds: Of all `count`, estimated.
        bound: What one takes longest for: compute, memory, or the host's launch.
        primitive_seconds: Of all `count`, were their primitive operators kernels of their own.
    """

    operator: Operator
    rank: int
    count: int
    seconds: float
    bound: Bound
    primitive_seconds: float

    def row(self) -> dict[str, Any]:
        """As plain data; FLOPs and bytes are of all `count`."""
        o = self.operator
        return {
            "rank": self.rank,
            "phase": o.phase,
            "module": o.module,
            "operator": o.name,
            "kind": o.kind,
            "shape": list(o.dims),
            "dtype": o.dtype,
            "count": self.count,
            "flops": o.flops * self.count,
            "bytes_read": o.read * self.count,
            "bytes_written": o.written * self.count,
            "primitives": o.primitives * self.count,
            "primitive_bytes": self.count * (o.primitive_bytes or o.bytes),
            "intensity": o.intensity,
            "bound": self.bound,
            "seconds": self.seconds,
            "primitive_seconds": self.primitive_seconds,
        }


def operator_seconds(o: Operator, m: DeviceRates, gpu: GPU, precision: str) -> float:
    """Seconds of one call on the GPU, its launch apart.

    Args:
        o: The operator.
        m: Reachable rates at the plan's precision.
        gpu: The planned GPU.
        precision: The plan's.
    """
    if o.kind == "memory":
        # Within layers, operators move more than their operands; a step's update streams.
        more = m.constants.plain_traffic if o.phase in COMPUTE_PHASES else 1.0
        return more * o.bytes / m.bandwidth
    rates = _rates_of(o.dtype, m, gpu, precision)
    if o.kind == "gemm":
        batch, rows, columns, inner = o.dims
        element, narrow = DTYPE_BYTES[o.dtype], o.dtype == "fp8"
        # One that is added to what is there is read, too.
        added = element * (1 + (o.name == "addmm_"))
        return float(batch * gemm_seconds(rates, rows, columns, inner, element, narrow, added))
    batch, heads, *_, head_dim = o.dims
    # FLOPs of the backward kernel are 2.5 times those of forward (2307.08691). A block of keys that
    # all queries see counts as a causal one of as many FLOPs.
    flops = o.flops / (2.5 if o.backward else 1.0)
    length = math.sqrt(flops / (2 * batch * heads * head_dim))
    passes = fused_attention(rates, flops, head_dim, length)
    return float(passes.backward if o.backward else passes.forward)


def operator_times(
    counted: Iterable[tuple[Operator, int]], rank: int, m: DeviceRates, gpu: GPU, precision: str
) -> list[OperatorTime]:
    """Times of counted operators, the longest first.

    Args:
        counted: Operators of a step, with their counts.
        rank: Rank that ran them.
        m: Reachable rates of the planned GPU.
        gpu: The planned GPU.
        precision: The plan's.
    """
    launch = 1e-6 * m.constants.launch_us
    found = []
    for operator, count in counted:
        each = m.constants.compute_slowdown * operator_seconds(operator, m, gpu, precision)
        bound: Bound = "memory" if operator.kind == "memory" else "compute"
        if operator.kind == "gemm" and each <= operator.bytes / m.bandwidth:
            bound = "memory"
        if launch > each:
            bound = "launch"
        exposed = launch * (not m.host_runs_ahead)
        parts = each if operator.primitive_bytes is None else _primitive_seconds(operator, each, m)
        found.append(
            OperatorTime(
                operator,
                rank,
                count,
                count * (each + exposed),
                bound,
                count * (parts + operator.primitives * exposed),
            )
        )
    return sorted(found, key=lambda one: -one.seconds)


def _primitive_seconds(o: Operator, each: float, m: DeviceRates) -> float:
    """Seconds of an operator's primitives, launches apart; attention's beside its GEMMs, which are
    taken to last as long as the kernel (`each`) does.
    """
    moved = (o.primitive_bytes or 0) * m.constants.plain_traffic / m.bandwidth
    return m.constants.compute_slowdown * moved + each * (o.kind == "attention")


def compute_seconds(times: Sequence[OperatorTime], m: DeviceRates) -> float:
    """Seconds of forward, recomputation and backward of one rank, as an estimate counts compute.

    A phase takes no less than its launches, from which a host that runs ahead cannot be hidden.
    """
    launch = 1e-6 * m.constants.launch_us * m.host_runs_ahead
    total = 0.0
    for phases in (("forward",), ("recompute", "backward")):
        own = [one for one in times if one.operator.phase in phases]
        total += max(sum(one.seconds for one in own), launch * sum(one.count for one in own))
    return total


def host_wait_seconds(times: Sequence[OperatorTime], m: DeviceRates) -> float:
    """Seconds of `compute_seconds` in which the GPU has done its operators, and waits for its host
    to launch more.
    """
    computed = (one.seconds for one in times if one.operator.phase in COMPUTE_PHASES)
    return max(0.0, compute_seconds(times, m) - sum(computed))


def _rates_of(dtype: str, m: DeviceRates, gpu: GPU, precision: str) -> DeviceRates:
    """Rates of an operator in `dtype`, which may be wider than the plan's: routers are fp32. A plan
    in TF32 runs all its fp32 GEMMs so.
    """
    if DTYPE_BYTES[dtype] < 4 or DTYPE_BYTES[precision] >= 4:
        return m
    return replace(m, flops_16bit=peak_flops(gpu, dtype))
