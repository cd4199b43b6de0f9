"""Bytes that the memory-bound operators of this engine's MoE layer move (`models/moe.py`), its
activation and shared experts apart.
"""

from __future__ import annotations

from dataclasses import dataclass

from workbench.costmodel.compute.engine_traffic.moved_bytes import MovedBytes, moved_by
from workbench.costmodel.inputs.config import Number

UPCAST_BYTES = 4
"""Of an element that a router computes with, or more where the plan's own has more."""


@dataclass(frozen=True)
class MoeLayerSizes:
    """An MoE layer on one rank."""

    tokens: Number
    rows_per_token: Number
    """Rows that the experts have."""
    hidden: Number
    experts: int
    """Of the router's scores."""
    top_k: int
    has_shared: bool
    is_gated: bool
    weights: Number
    """Elements of the routed experts' weights that have gradients."""
    trains_router: bool = True
    """Whether the router's weight has a gradient, which reads its input."""


def moe_layer_bytes(s: MoeLayerSizes, e: int, is_grouped: bool) -> MovedBytes:
    """Bytes of router, dispatch, combine, and the weights' gradients of the experts.

    Args:
        s: The layer.
        e: Bytes of an element.
        is_grouped: Whether the GEMMs of all experts are one kernel.
    """
    u, t, h = max(e, UPCAST_BYTES), s.tokens, s.hidden
    cast, k, rows = (e + u) * (e < u), s.top_k, t * s.rows_per_token
    # The router's input is upcast in both passes, its gradient cast; its scores are of all experts.
    found = moved_by([cast], [cast * s.trains_router, cast]).wide(t * h)
    found += moved_by([2 * u, u, u], [3 * u, u, 3 * u, 2 * u]).wide(t * s.experts)
    # Dispatch gathers rows; backward gathers the gradients of each choice, and adds them.
    found += moved_by([2 * e * s.rows_per_token], [2 * e] + [2 * e, 3 * e] * (k - 1)).wide(t * h)
    if s.is_gated:
        found += moved_by([], [3 * e]).wide(rows * h)
    # Combine: a product with the gate for each choice, added up.
    found += moved_by(
        [2 * e, 2 * e] + [2 * e, 3 * e] * (k - 1), [2 * e, 3 * e, e, 2 * e, 3 * e] * k
    ).wide(t * h)
    found += moved_by([], [e]).wide(rows * h)
    # The input's gradients from router, dispatch and shared experts.
    found += moved_by([], [3 * e]).wide(t * h * (1 + s.has_shared))
    return found + moved_by([], [(2 if is_grouped else 1) * e]).wide(s.weights)
