"""Seconds of a layer's GEMMs by the roofline."""

from __future__ import annotations

from dataclasses import replace

from workbench.costmodel.compute.engine_traffic.engine_operators import (
    casts_eagerly,
    counts_operators,
)
from workbench.costmodel.compute.kernel_rates import (
    DeviceRates,
    PassTimes,
    gemm_seconds,
    peak_flops,
)
from workbench.costmodel.inputs.config import Number
from workbench.costmodel.inputs.layer_gemms import LayerGemm, layer_gemms
from workbench.costmodel.inputs.rank_workload import Workload


def layer_gemm_seconds(
    p: LayerGemm, w: Workload, m: DeviceRates, result: Number | None = None
) -> Number:
    """Seconds of all GEMMs of one kind, whose results move `result` bytes an element, if not those
    of an activation.
    """
    e, narrow = w.element_bytes, w.quantized_format is not None
    if p.upcast and e < w.upcast_bytes:
        wide = replace(m, flops_16bit=peak_flops(w.fixed.gpu, "fp32"))
        return p.count * gemm_seconds(
            wide, p.rows, p.columns, p.inner, w.upcast_bytes, result=result
        )
    return p.count * gemm_seconds(m, p.rows, p.columns, p.inner, e, narrow, result)


def accumulated_result_bytes(w: Workload) -> Number | None:
    """Bytes that an element of a weight's gradient moves in its GEMM: where the GEMM adds to the
    accumulated one, tile by tile beside the products of other tiles, it is read and written; None
    where it is a tensor of its own.
    """
    separate = w.fixed.framework.model_states.separate_gradient
    return None if separate else 2 * w.stored_gradient_bytes


def gemm_pass(w: Workload, m: DeviceRates, is_moe: bool) -> PassTimes:
    """Seconds of one layer's GEMMs; the backward of a GEMM is two, for input and weight."""
    gemms = layer_gemms(w, is_moe)
    each = [layer_gemm_seconds(p, w, m) for p in gemms]
    forward: Number = sum(each)
    added = accumulated_result_bytes(w)
    weight_grad: Number = sum(layer_gemm_seconds(p.weight_gradient, w, m, added) for p in gemms)
    backward = weight_grad + sum(layer_gemm_seconds(p.input_gradient, w, m) for p in gemms)
    # The output of an expert's is saved: combine's gradient needs it. This engine's fp8 layers save
    # their inputs when they have run.
    runs_whole = (is_moe and w.shape.moe) or (counts_operators(w) and casts_eagerly(w))
    last = 0.0 if runs_whole else each[-1]
    return PassTimes(forward, backward, weight_grad, last_gemm=last)
