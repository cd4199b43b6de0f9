"""GEMM into an existing output, which may have a wider dtype than the operands."""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.planned_device import on_gpu

CHUNK_NUMEL = 2**22
"""Entries upcast at once where no GEMM has 16-bit inputs and an fp32 output."""


def multiply_into(out: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
    """out = a b, or out += a b unless `first`.

    On GPUs the product is added in the GEMM's own accumulators, in one pass over `out`.

    Args:
        out: [M, N].
        a: [M, K].
        b: [K, N], of the dtype of `a`.
        first: `out` holds nothing yet.
    """
    if out.dtype == a.dtype:
        torch.mm(a, b, out=out) if first else out.addmm_(a, b)
    elif on_gpu(out):
        torch.addmm(out, a, b, beta=0 if first else 1, out_dtype=out.dtype, out=out)
    else:  # torch has that GEMM on CUDA only
        step = max(1, CHUNK_NUMEL // max(*out.shape, 1))
        for at in range(0, len(b), step):
            out.addmm_(
                a[:, at : at + step].to(out.dtype),
                b[at : at + step].to(out.dtype),
                beta=float(at or not first),
            )
