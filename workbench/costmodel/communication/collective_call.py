"""One collective of a step as the cost model counts it, and the calls that every tensor layout makes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from workbench.costmodel.inputs.config import Number
from workbench.costmodel.inputs.rank_workload import Workload


@dataclass(frozen=True)
class CollectiveCall:
    """Calls of one collective a step, by pipeline rank; `bytes` is the full tensor's."""

    axis: str
    kind: str
    group_size: Number
    dtype: str
    bytes: Number
    count: Number
    action: str


def gradient_dtype_name(w: Workload) -> str:
    """Of one plan; of many it is not asked for."""
    alike = np.ndim(w.gradient_element_bytes) or float(w.gradient_element_bytes) == w.element_bytes
    return w.dtype if alike else "fp32"


def shared_kv_head_calls(w: Workload) -> list[CollectiveCall]:
    """Gradients of key and value projections that several tensor ranks hold alike, where heads are
    fewer than ranks.
    """
    shape = w.shape
    if shape.mla is not None:
        return []
    columns = w.tiling.column_parts
    times = 2 * w.microbatches * w.layers * (columns > int(shape.kv_heads or 0))
    sizes = [
        shape.kv_width * w.weight_in_dim,
        *([shape.kv_width] if shape.biases in ("qkv", "all") else []),
    ]
    return [
        CollectiveCall("tensor", "all_reduce", columns, w.dtype, n * w.element_bytes, times, "B")
        for n in sizes
    ]
