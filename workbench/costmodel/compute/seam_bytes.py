"""Bytes that the memory-bound operators of a layer move: norms, residual additions, rotary
positions and activations, counted over the kernels that run them.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache

from workbench import data_files

Bytes = tuple[float, float]
"""(forward, backward), of 16-bit activations, an element of the operator's width."""


@dataclass(frozen=True)
class SeamBytes:
    """Bytes that each kind of operator moves, an element of its width.

    Counted by operand, read or written once by each kernel; `data/planner.yaml` has the counts.
    """

    residual: Bytes
    layernorm: Bytes
    rmsnorm: Bytes
    rope: Bytes
    """An element of the queries and keys."""
    gated: Bytes
    """An element of the feed-forward width of SwiGLU or GeGLU."""
    plain: Bytes
    """The same of an activation without a gate."""


@lru_cache(maxsize=8)
def seam_bytes(kernels: str, single_norm: bool) -> SeamBytes:
    """Bytes moved under `kernels` (eager, compiled, fused, and this engine's own fused ones).

    Args:
        kernels: How a plan's operators run.
        single_norm: Whether eager RMSNorm is one kernel, not a chain of elementwise ones.
    """
    table = data_files.read_data_file("data/planner.yaml")["seam_bytes"]
    found = {f.name: _pair(table[f.name][kernels]) for f in fields(SeamBytes)}
    if single_norm and kernels == "eager":
        found["rmsnorm"] = found["layernorm"]
    return SeamBytes(**found)


def _pair(value: list[float]) -> Bytes:
    forward, backward = value
    return float(forward), float(backward)
