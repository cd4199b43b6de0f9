"""Registry of the fused operators: what they compute, where they run, and cases to compile them at.

A case makes the operator's inputs and calls it as a model would; tile and number of warps are the
operator's choice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from workbench.kernels import adamw, residual_norm, rope
from workbench.kernels.activation import GATED, activate
from workbench.kernels.bias_dropout_residual import dropout_add
from workbench.kernels.cross_entropy import cross_entropy
from workbench.kernels.four_bit_weight import dequantize_four_bit, quantize_four_bit
from workbench.kernels.linear_cross_entropy import linear_cross_entropy
from workbench.kernels.weight_only_gemv import MAX_TOKENS, quantize_weight, weight_only_gemv
from workbench.runtime_facts.four_bit_sizes import FourBitFormat

ROWS, HIDDEN = 32, 4096
"""Rows and columns of a case. Kernels do not depend on the number of rows, except that it usually
is a multiple of 16.
"""

VOCABULARIES = (8192, 128256)
PARAMETERS = {"bf16": torch.bfloat16, "fp32": torch.float32}

COMPILED = "torch.compile if large"
"""Above the sizes of `runtime_facts.fused_thresholds`."""

Case = Callable[[], Tensor | tuple[Tensor, ...] | None]
"""Runs forward, and returns the tensors that backward starts from, if there is one."""


@dataclass(frozen=True)
class Kernel:
    """A fused operator.

    `gpu` and `cpu` name its backends, `reference` its plain version. `small` names the Triton
    functions that stream no tensor: they read or write a few numbers per row or tensor; `summing`
    those that only read a stream, and write a few numbers.
    """

    name: str
    title: str
    module: str
    gpu: str
    cpu: str
    cases: dict[str, Case] = field(hash=False)
    small: tuple[str, ...] = ()
    summing: tuple[str, ...] = ()

    @property
    def reference(self) -> str:
        """Dotted name of the plain version, which the operator must equal."""
        return f"{self.module}.reference"

    def streams(self, function: str) -> str:
        """Full tensors that a Triton function streams: nothing, in, or in and out."""
        return (
            "nothing"
            if function in self.small
            else "in"
            if function in self.summing
            else "in and out"
        )


def _tensor(*shape: int, dtype: torch.dtype = torch.bfloat16, grad: bool = True) -> Tensor:
    return torch.zeros(shape, dtype=dtype, requires_grad=grad)


def _norm(hidden: int, centred: bool) -> tuple[Tensor, Tensor]:
    bias = _tensor(hidden) if centred else None
    return residual_norm.add_norm(
        _tensor(ROWS, hidden), _tensor(ROWS, hidden), _tensor(hidden), bias, 1e-5, centred
    )


def _dropout(hidden: int, alone: bool) -> Tensor:
    bias, residual = (None, None) if alone else (_tensor(hidden), _tensor(ROWS, hidden))
    return dropout_add(
        _tensor(ROWS, hidden), bias, residual, torch.arange(ROWS), key=2**40 + 1, rate=0.1
    )


def _rope(head_dim: int) -> tuple[Tensor, Tensor]:
    q, k = (_tensor(1, ROWS, heads, head_dim).clone() for heads in (32, 8))
    cos, sin = (_tensor(ROWS, head_dim // 2, grad=False) for _ in range(2))
    return rope.rope(q, k, cos, sin)


def _activation(kind: str, width: int) -> Tensor:
    gated = kind in GATED
    other = _tensor(ROWS, width) if gated else _tensor(width)
    return activate(kind, _tensor(ROWS, width), *((other, None) if gated else (None, other)))


def _loss(vocab: int) -> Tensor:
    return cross_entropy(_tensor(ROWS, vocab).clone(), torch.zeros(ROWS, dtype=torch.int64))


def _head(vocab: int, smoothing: float) -> Tensor:
    x, weight, targets = _tensor(ROWS, 64), _tensor(vocab, 64), torch.zeros(ROWS, dtype=torch.int64)
    return linear_cross_entropy(x, weight, targets, smoothing=smoothing, z=smoothing / 1000)


def _step(dtype: torch.dtype) -> None:
    parameter, gradient = (_tensor(HIDDEN, ROWS, dtype=dtype, grad=False) for _ in range(2))
    kept = [_tensor(HIDDEN, ROWS, dtype=torch.float32, grad=False) for _ in range(3)]
    master = None if dtype == torch.float32 else kept[2]
    stepped = adamw.AdamWTensor(
        parameter, gradient, kept[0], kept[1], torch.zeros(()), master, decay=0.1
    )
    adamw.FusedAdamW([stepped], 0.9, 0.95, 1e-8).step(1e-3)


def _decode(tokens: int, bits: int, group: int | None) -> Tensor:
    return weight_only_gemv(
        _tensor(tokens, HIDDEN, grad=False),
        quantize_weight(_tensor(HIDDEN, HIDDEN, grad=False), bits, group),
    )


def _frozen(form: FourBitFormat) -> Tensor:
    weight = quantize_four_bit(_tensor(ROWS, HIDDEN, grad=False), form)
    return dequantize_four_bit(weight, torch.bfloat16)


KERNELS: tuple[Kernel, ...] = (
    Kernel(
        "add_norm",
        "residual + RMSNorm, LayerNorm",
        "workbench.kernels.residual_norm",
        "Triton",
        f"{COMPILED}, ATen LayerNorm",
        {
            f"{kind}, bf16 x {hidden}": partial(_norm, hidden, kind == "LayerNorm")
            for kind in ("RMSNorm", "LayerNorm")
            for hidden in (HIDDEN, residual_norm.MAX_ROW_BYTES // 2)
        },
    ),
    Kernel(
        "rope",
        "rotary positions in place",
        "workbench.kernels.rope",
        "Triton",
        COMPILED,
        {f"heads of bf16 x {size}": partial(_rope, size) for size in (128, 2 * rope.TILE)},
    ),
    Kernel(
        "activation",
        "SwiGLU, GeGLU, bias + GELU",
        "workbench.kernels.activation",
        "Triton",
        COMPILED,
        {
            f"{kind}, bf16 x {4 * HIDDEN}": partial(_activation, kind, 4 * HIDDEN)
            for kind in (*GATED, "gelu")
        },
    ),
    Kernel(
        "cross_entropy",
        "cross entropy of materialized logits",
        "workbench.kernels.cross_entropy",
        "Triton",
        "torch.compile",
        {f"bf16 x {vocab}": partial(_loss, vocab) for vocab in VOCABULARIES},
        summing=("cross_entropy_statistics",),
    ),
    Kernel(
        "linear_cross_entropy",
        "projection + cross entropy",
        "workbench.kernels.linear_cross_entropy",
        "chunked: ATen, Triton",
        "chunked: ATen, torch.compile",
        {
            **{f"bf16 x {vocab}": partial(_head, vocab, 0.0) for vocab in VOCABULARIES},
            f"smoothed, bf16 x {VOCABULARIES[-1]}": partial(_head, VOCABULARIES[-1], 0.1),
        },
    ),
    Kernel(
        "dropout",
        "bias + dropout + residual",
        "workbench.kernels.bias_dropout_residual",
        "Triton",
        "ATen",
        {
            f"bf16 x {HIDDEN}": partial(_dropout, HIDDEN, False),
            f"bf16 x {5 * HIDDEN // 4}": partial(_dropout, 5 * HIDDEN // 4, False),
            f"alone, bf16 x {HIDDEN}": partial(_dropout, HIDDEN, True),
        },
    ),
    Kernel(
        "adamw",
        "AdamW of many tensors",
        "workbench.kernels.adamw",
        "Triton",
        "ATen fused",
        {f"{name} parameters": partial(_step, dtype) for name, dtype in PARAMETERS.items()},
        small=("adamw_count",),
    ),
    Kernel(
        "matvec",
        "weight-only INT8/INT4 GEMV",
        "workbench.kernels.weight_only_gemv",
        "Triton",
        "torch.compile",
        {
            f"{tokens} x bf16 x {HIDDEN}, {bits} bits": partial(_decode, tokens, bits, group)
            for tokens in (1, MAX_TOKENS)
            for bits, group in {8: None, 4: 128}.items()
        },
        summing=("matvec_threads", "matvec_cores"),
    ),
    Kernel(
        "four_bit",
        "frozen NF4/INT4 weight to 16 bits",
        "workbench.kernels.four_bit_weight",
        "Triton",
        "ATen",
        {
            f"NF4, double, x {HIDDEN}": partial(_frozen, FourBitFormat("nf4", 64, True)),
            f"INT4 x {HIDDEN}": partial(_frozen, FourBitFormat("int4", 128, False)),
        },
    ),
)
