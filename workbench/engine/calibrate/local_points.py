"""Measured points without communication: GEMMs, memory streams, attention, operator overhead.

All ranks measure them at the same time, because they share memory bandwidth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from workbench.engine.calibrate.measured_sizes import CalibrationSurvey
from workbench.engine.precision import DTYPES

NUM_CHAINED_OPERATORS = 50
"""Operators of the chain from which the overhead per operator is measured."""


@dataclass(frozen=True)
class Point:
    """One thing to time.

    `how`: a collective (`together`) is called equally often by all ranks; other points repeat for a
    window of time, of which points that neighbours cannot slow (`host`) count the fastest call.
    """

    section: str
    labels: dict[str, Any]
    call: Callable[[], object]
    how: Literal["alone", "host", "together"] = "alone"
    between: Callable[[], object] | None = None
    """Work between two calls of a collective, whose own time is subtracted."""


def local_points(survey: CalibrationSurvey, device: torch.device) -> Iterator[Point]:
    """All points without communication."""
    for dtype in survey.dtypes:
        for rows, columns, inner in survey.gemm:
            labels = {"rows": rows, "columns": columns, "inner": inner, "dtype": dtype}
            yield Point("gemm", labels, _gemm(rows, columns, inner, DTYPES[dtype], device))
        for batch, heads, sequence, head_dim in survey.attention:
            labels = {
                "batch": batch,
                "heads": heads,
                "sequence": sequence,
                "head_dim": head_dim,
                "dtype": dtype,
            }
            forward, backward = _attention(
                (batch, heads, sequence, head_dim), DTYPES[dtype], device
            )
            yield Point("attention", {**labels, "pass": "forward"}, forward)
            yield Point("attention", {**labels, "pass": "backward"}, backward)
    for size in survey.streams:
        yield Point("memory", {"bytes": size}, _stream(size, device))
    yield Point("operator", {"autograd": False}, _operators(device, False), "host")
    yield Point("operator", {"autograd": True}, _operators(device, True), "host")


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
    shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device
) -> tuple[Callable[[], object], Callable[[], object]]:
    batch, heads, sequence, head_dim = shape
    made = (
        torch.randn(batch, sequence, heads, head_dim, device=device).to(dtype) for _ in range(3)
    )
    q, k, v = (x.transpose(1, 2).requires_grad_() for x in made)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    gradient = torch.ones_like(out)

    def forward() -> Tensor:
        with torch.no_grad():
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

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
