"""Measured points without communication: GEMMs, memory streams, attention, operator overhead.

All ranks measure them at the same time, because they share memory bandwidth.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from workbench.engine.calibrate.measured_sizes import CalibrationSurvey
from workbench.engine.precision import DTYPES
from workbench.machine.calibration_file import AttentionKernel, Dtype
from workbench.models.attention.attention_kernels import attention
from workbench.plan.schema import STORED

NUM_CHAINED_OPERATORS = 50
"""Operators of the chain from which the overhead per operator is measured."""


@dataclass(frozen=True)
class Point:
    """One thing to time.

    `how`: a collective (`together`) is called equally often by all ranks; other points repeat for a
    window of time, by the clock of the device (`alone`), of the host that keeps one thread busy
    (`host`) or all threads of the rank (`cores`).
    """

    section: str
    labels: dict[str, Any]
    call: Callable[[], object]
    how: Literal["alone", "host", "cores", "together"] = "alone"
    between: Callable[[], object] | None = None
    """Work between two calls of a collective, whose own time is subtracted."""
    repeats: int = 1
    """Operators that one call runs."""


def local_points(survey: CalibrationSurvey, device: torch.device) -> Iterator[Point]:
    """All points without communication."""
    for dtype in survey.dtypes:
        for rows, columns, inner in survey.gemm:
            labels = {"rows": rows, "columns": columns, "inner": inner, "dtype": dtype}
            call = _gemm(rows, columns, inner, DTYPES[stored_dtype(dtype)], device)
            yield Point("gemm", labels, _as_dtype(dtype, call))
        for shape, kernel in itertools.product(survey.attention, survey.kernels.get(dtype, ())):
            yield from _attention_points(shape, kernel, dtype, device)
    for size in survey.streams:
        yield Point("memory", {"bytes": size}, _stream(size, device))
    yield Point("operator", {"autograd": False}, _operators(device, False), "host")
    yield Point("operator", {"autograd": True}, _operators(device, True), "host")


def stored_dtype(dtype: Dtype) -> Dtype:
    """The dtype of tensors in a plan's precision."""
    return cast("Dtype", STORED.get(dtype, dtype))


def _as_dtype(dtype: Dtype, call: Callable[[], object]) -> Callable[[], object]:
    """`call`, with TF32 products where the dtype is tf32, and only there."""

    def in_tf32() -> object:
        torch.set_float32_matmul_precision("high")
        try:
            return call()
        finally:
            torch.set_float32_matmul_precision("highest")

    return in_tf32 if dtype == "tf32" else call


def _attention_points(
    shape: tuple[int, int, int, int], kernel: AttentionKernel, dtype: Dtype, device: torch.device
) -> Iterator[Point]:
    """Both passes of one kernel."""
    sizes = dict(zip(("batch", "heads", "sequence", "head_dim"), shape))
    labels = {**sizes, "dtype": dtype, "kernel": kernel}
    forward, backward = _attention(shape, kernel, DTYPES[stored_dtype(dtype)], device)
    yield Point("attention", {**labels, "pass": "forward"}, _as_dtype(dtype, forward))
    yield Point("attention", {**labels, "pass": "backward"}, _as_dtype(dtype, backward))


def _gemm(
    rows: int, columns: int, inner: int, dtype: torch.dtype, device: torch.device
) -> Callable[[], object]:
    x, weight = (torch.randn(n, inner, device=device).to(dtype) for n in (rows, columns))

    def call() -> Tensor:
        with torch.no_grad():
            return F.linear(x, weight)

    return call


def _stream(size: int, device: torch.device) -> Callable[[], object]:
    """An addition that allocates its result, as eager operators do: page faults are included."""
    a, b = (torch.ones(size // 12, device=device) for _ in range(2))
    return lambda: a + b


def _attention(
    shape: tuple[int, int, int, int], kernel: str, dtype: torch.dtype, device: torch.device
) -> tuple[Callable[[], object], Callable[[], object]]:
    batch, heads, sequence, head_dim = shape
    made = (
        torch.randn(batch, sequence, heads, head_dim, device=device).to(dtype) for _ in range(3)
    )
    q, k, v = (x.transpose(1, 2).requires_grad_() for x in made)
    out = attention(kernel, q, k, v)
    gradient = torch.ones_like(out)

    def forward() -> Tensor:
        with torch.no_grad():
            return attention(kernel, q, k, v)

    return forward, lambda: torch.autograd.grad(out, (q, k, v), gradient, retain_graph=True)


def _operators(device: torch.device, autograd: bool) -> Callable[[], object]:
    """A chain of operators on so little data that only host overhead remains."""
    x = torch.ones(8, device=device, requires_grad=autograd)
    y = torch.ones(8, device=device)

    def call() -> None:
        z = x
        for _ in range(NUM_CHAINED_OPERATORS):
            z = z + y
        if autograd:
            z.backward(y)

    return call
