"""What this engine's fp8 linear layers move beside their GEMMs: largest entries, casts and copies.

torchao casts each operand by plain operators, to fp32 first, and again for every GEMM that reads it
(`parallel/float8/float8_linear.py`; torchao's `float8_training_tensor.py` and `float8_ops.py`).
"""

from __future__ import annotations

from workbench.costmodel.compute.engine_traffic.moved_bytes import MovedBytes, moved_by
from workbench.costmodel.inputs.config import Number
from workbench.costmodel.inputs.layer_gemms import LayerGemm, layer_gemms
from workbench.costmodel.inputs.rank_workload import Workload

SCALE_KERNELS = 9.0
"""Kernels on a single number: a largest entry to fp32, and its scale, which is computed in fp64 and
rounded to a power of two.
"""
INVERSE_KERNELS = 2.0
"""The same of a GEMM: the inverses of both scales."""
REORDERED = 2
"""Bytes an element of putting 8 bits in the order that cuBLAS takes."""


def float8_bytes(w: Workload) -> MovedBytes:
    """Bytes and kernels of one dense layer and microbatch."""
    q, k, v, o, *into, down = layer_gemms(w, False)
    found = _group_bytes(w, [q, k, v]) + _group_bytes(w, into)
    for gemm in (o, down):
        found += _group_bytes(w, [gemm])
    return found


def _group_bytes(w: Workload, gemms: list[LayerGemm]) -> MovedBytes:
    """Of layers that share an input, whose scale column-parallel ones find once."""
    split = 1.0 * (w.tensor > 1)
    inputs = gemms[0].rows * gemms[0].inner
    calls = split + len(gemms) * (1 - split)
    found = _largest(w, inputs, 0.0).times(calls)
    # Numbers are stacked for each axis whose ranks reduce them, those of one rank too.
    column = len(gemms) > 1
    found += MovedBytes(0.0, 0.0, calls * (1 + split), calls * (1 + split * column))
    for gemm in gemms:
        found += _operand_bytes(w, inputs, gemm)
        if w.shape.biases == "all" or (w.shape.biases == "qkv" and len(gemms) == 3):
            outputs = gemm.rows * gemm.columns
            found += moved_by([2 * w.element_bytes * outputs], [])  # an operator of its own
    return found + _summed_gradients(w, len(gemms), inputs, split)


def float8_linear_bytes(w: Workload, rows: float, columns: float, inner: float) -> MovedBytes:
    """Bytes of one linear layer whose scales are its own, its bias apart."""
    inputs = rows * inner
    return _largest(w, inputs, 0.0) + _operand_bytes(w, inputs, LayerGemm(rows, columns, inner))


def _operand_bytes(w: Workload, inputs: Number, gemm: LayerGemm) -> MovedBytes:
    """Of the operands of a layer's GEMMs, but for finding its input's largest entry."""
    weights, outputs = gemm.inner * gemm.columns, gemm.rows * gemm.columns
    found = _largest(w, weights, 0.0) + _largest(w, 0.0, outputs)
    found += _casts(w, inputs, inputs) + _casts(w, weights, weights) + _casts(w, 0.0, outputs)
    found += _casts(w, 0.0, outputs)
    found += moved_by([], [REORDERED * size for size in (weights, outputs, inputs)])
    return found + MovedBytes(0.0, 0.0, INVERSE_KERNELS, 2 * INVERSE_KERNELS)


def _largest(w: Workload, forward: Number, backward: Number) -> MovedBytes:
    """Finding the largest absolute entry of so many, and its scale."""
    e = w.element_bytes
    found = moved_by([2 * e * forward, e * forward], [2 * e * backward, e * backward])
    kernels = found.forward_kernels, found.backward_kernels
    scales = MovedBytes(0.0, 0.0, *(SCALE_KERNELS * each / 2 for each in kernels))
    return found + scales


def _casts(w: Workload, forward: Number, backward: Number) -> MovedBytes:
    """To fp32, times the scale, clamped, to 8 bits."""
    steps = w.element_bytes + 4, 8, 8, 5
    return moved_by([each * forward for each in steps], [each * backward for each in steps])


def _summed_gradients(w: Workload, layers: int, inputs: Number, split: Number) -> MovedBytes:
    """Adding the gradients of column-parallel layers' input, which in wider dtypes GEMMs do."""
    each = 3 * w.element_bytes * inputs * split
    return moved_by([], [each] * (layers - 1))
