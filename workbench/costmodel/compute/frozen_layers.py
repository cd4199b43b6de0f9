"""Compute of a layer whose weights are frozen beside low-rank adapters (LoRA, 2106.09685), also in
4 bits (QLoRA, 2305.14314).

Of its backward the gradients of inputs alone are left, from the first adapter on.
"""

from __future__ import annotations

from workbench.costmodel.compute.engine_traffic.engine_operators import dropped_bytes, layer_parts
from workbench.costmodel.compute.engine_traffic.moved_bytes import MovedBytes, moved_by
from workbench.costmodel.compute.frozen_gemms import (
    FrozenGemm,
    dequantized_weight_bytes,
    frozen_gemms,
    has_branch_gradient,
    is_routed,
)
from workbench.costmodel.compute.gemm_passes import layer_gemm_seconds
from workbench.costmodel.compute.kernel_rates import DeviceRates, PassTimes, gemm_seconds
from workbench.costmodel.inputs.adapted_layers import AdaptedLayer
from workbench.costmodel.inputs.config import Number
from workbench.costmodel.inputs.layer_gemms import LayerGemm
from workbench.costmodel.inputs.rank_workload import Workload

DROPOUT_KERNELS = 114.0, 119.0
"""Of drawing the mask of an adapter's input and dropping by it (forward, backward) by plain
operators (`models/counter_dropout.py`).
"""


def frozen_gemm_pass(w: Workload, m: DeviceRates, kind: AdaptedLayer) -> PassTimes:
    """Seconds of one layer's GEMMs. Gradients of adapters' weights are part of the backward that a
    split one runs first (I): they are computed where those of their inputs are.
    """
    forward: Number = 0.0
    backward: Number = 0.0
    gemms = frozen_gemms(w, kind)
    for gemm in gemms:
        forward = forward + layer_gemm_seconds(gemm.base, w, m)
        backward = backward + gemm.has_input_gradient * layer_gemm_seconds(
            gemm.base.input_gradient, w, m
        )
        thin = _thin_gemm_pass(w, m, gemm)
        forward, backward = forward + thin.forward, backward + thin.backward
    # What an adapter and a dequantized weight save is there when the down projection has run.
    last = gemms[-1]
    ends = kind.is_moe or last.down is not None or w.fixed.four_bit is not None
    return PassTimes(
        forward, backward, last_gemm=0.0 if ends else layer_gemm_seconds(last.base, w, m)
    )


def _thin_gemm_pass(w: Workload, m: DeviceRates, gemm: FrozenGemm) -> PassTimes:
    """GEMMs of an adapter, in 16 bits or more beside narrower ones."""
    down, up = gemm.down, gemm.up
    if down is None or up is None:
        return PassTimes(0.0, 0.0)

    e = w.element_bytes

    def seconds(p: LayerGemm, added: Number = 0.0) -> Number:
        moved = e * (1 + added)  # what is added to a result is read, too
        return p.count * gemm_seconds(m, p.rows, p.columns, p.inner, e, result=moved)

    backward = sum(
        seconds(p) for p in (down.weight_gradient, up.input_gradient, up.weight_gradient)
    )
    of_input = seconds(down.input_gradient, gemm.joined * (not w.fixed.drops_adapter_inputs))
    forward = seconds(down) + seconds(up, 1.0 * up.ungrouped)
    return PassTimes(forward, backward + gemm.has_input_gradient * of_input)


def frozen_layer_bytes(w: Workload, kind: AdaptedLayer, drawn: float) -> MovedBytes:
    """Bytes of one layer and microbatch as this engine runs it, GEMMs and attention apart.

    Args:
        w: Per-rank problem sizes.
        kind: The layer.
        drawn: Bytes an entry of drawing a dropout mask and dropping by it by plain operators.
    """
    parts, branch = layer_parts(w, kind.is_moe), has_branch_gradient(w, kind)
    found = _passes(parts.first_norm, kind.has_input_gradient)
    found += _passes(parts.last_norm, branch)
    found += _passes(parts.attention, kind.has_attention_backward)
    found += _passes(parts.feed_forward, branch or bool(kind.of("mlp.")))
    # Without gradients of weights autograd adds those of inputs itself, on tensor ranks too.
    stream, each = w.tokens * w.hidden_per_rank, 3 * w.element_bytes
    found += moved_by([], [each * kind.has_input_gradient] * 2).wide(stream)
    if w.shape.gated and not kind.is_moe:
        found += moved_by([], [each * branch]).wide(stream)
    return found + adapter_bytes(w, kind, drawn)


def _passes(moved: MovedBytes, has_backward: bool) -> MovedBytes:
    return moved if has_backward else MovedBytes(moved.forward, 0.0, moved.forward_kernels, 0.0)


def adapter_bytes(w: Workload, kind: AdaptedLayer, drawn: float) -> MovedBytes:
    """Bytes of what adapters and weights in 4 bits have beside GEMMs; `drawn` as above."""
    found, e = MovedBytes(), w.element_bytes
    for gemm in frozen_gemms(w, kind):
        if w.fixed.four_bit is not None:
            stored = dequantized_weight_bytes(w, gemm)
            found += moved_by([stored], [stored * gemm.has_input_gradient])
        if gemm.down is None or gemm.up is None:
            continue
        rows, apart = gemm.down.rows * gemm.down.count, 1 - gemm.joined
        found += moved_by([2 * e], [2 * e]).wide(rows * gemm.down.columns).times(apart)  # the scale
        own = moved_by([], [3 * e]).times(apart)  # added to the base's gradient of its input
        if w.fixed.drops_adapter_inputs:
            kernels = (1.0, 1.0) if w.uses_fused_kernels else DROPOUT_KERNELS
            each = dropped_bytes(w, drawn)
            own = moved_by([], [3 * e]) + MovedBytes(each, each, *kernels)
            own += moved_by([], [2 * e]).times(gemm.joined)  # the scale
        found += _passes(own.wide(rows * gemm.down.inner), gemm.has_input_gradient)
        if is_routed(gemm.base):  # added to the base's output
            found += moved_by([3 * e], []).wide(rows * gemm.up.columns)
    return found
