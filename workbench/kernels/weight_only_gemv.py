"""Few tokens times a weight of 8 or 4 bits, which is what decoding reads.

A weight is read once, as it is stored, and widened in registers; sums are in fp32 or better. One
token is multiplied by threads; several of 16 bits by tensor cores, where small integers are exact.
More than `MOST_TOKENS` are the plain path's, which widens the weight by rows. There is no gradient.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import custom_op

from workbench.kernels.backends.compiled_reference import compiled
from workbench.kernels.backends.triton_compat import (
    INTERPRETED,
    jit,
    next_power_of_2,
    programs,
    runs_triton,
    tl,
    wide,
)
from workbench.kernels.input_checks import check, check_shape, rows_of, wide_dtype
from workbench.kernels.weight_quantization import (
    CENTRE,
    GROUPS,
    PACKED,
    Quantised,
    check_form,
    dequantise,
    quantise,
    words_of,
)

__all__ = ["MOST_TOKENS", "Quantised", "dequantise", "matvec", "quantise", "reference"]

MOST_TOKENS = 8
"""That a kernel multiplies at once."""
RAISED = 0x4B000000
"""As fp32 this is 2**23, whose last bit is 1: a small integer in its low bits makes it 2**23 more
than that integer, which is how kernels widen integers, for conversions are slow. They get it as an
argument because the compiler, if it knew it, would split the one instruction that masks and sets
bits.
"""
WIDENED = 2**20
"""Entries of a weight that the plain path widens at once."""


def reference(x: Tensor, weight: Quantised) -> Tensor:
    """x [..., K] times the widened weight, [..., N], in fp64."""
    scales = weight.scales.double()
    zeros = None if weight.zeros is None else weight.zeros.double()
    return x.double() @ dequantise(weight._replace(scales=scales, zeros=zeros)).t()


# ---- Triton --------------------------------------------------------------------------------------


@jit
def matvec_threads(  # type: ignore[no-untyped-def]
    X,
    W,
    S,
    Z,
    Y,
    num_rows,
    num_columns,
    num_words,
    num_groups,
    RAISED,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    CENTRE: tl.constexpr,
    HAS_Z: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    TOGETHER: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Some rows times one token a program. `TOGETHER` words are a thread's own, and share
    scales.
    """
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    X += tl.program_id(1).to(tl.int64) * num_columns
    Y += tl.program_id(1).to(tl.int64) * num_rows
    total = tl.zeros((ROWS, BLOCK // TOGETHER), WIDE)
    for start in range(0, num_words, BLOCK):
        words = start + tl.arange(0, BLOCK)
        some = start + tl.arange(0, BLOCK // TOGETHER) * TOGETHER
        here = (rows < num_rows)[:, None] & (words < num_words)[None, :]
        stored = tl.load(W + rows[:, None] * num_words + words[None, :], mask=here, other=0)
        if BITS == 8:
            x = tl.load(X + words, mask=words < num_columns, other=0.0).to(WIDE)
            part = _byte(stored).to(WIDE) * x[None, :]
            total += _scaled(
                part,
                x,
                S,
                Z,
                rows,
                some // GROUP,
                num_rows,
                num_groups,
                CENTRE,
                HAS_Z,
                WIDE,
                TOGETHER,
            )
        else:
            low = stored.to(tl.uint32, bitcast=True)
            high = low >> 16
            for g in tl.static_range(PACKED // GROUP):
                part = tl.zeros((ROWS, BLOCK), WIDE)
                sum_x = tl.zeros((BLOCK,), WIDE)
                for i in tl.static_range(g * (GROUP // 16), (g + 1) * (GROUP // 16)):
                    columns = words // 16 * PACKED + words % 16 + 16 * i
                    x = tl.load(X + columns, mask=columns < num_columns, other=0.0).to(WIDE)
                    number = _half_byte(low if i < 4 else high, 4 * (i % 4), RAISED)
                    part += number.to(WIDE) * x[None, :]
                    sum_x += x
                groups = some // 16 * (PACKED // GROUP) + g
                total += _scaled(
                    part,
                    sum_x,
                    S,
                    Z,
                    rows,
                    groups,
                    num_rows,
                    num_groups,
                    CENTRE,
                    HAS_Z,
                    WIDE,
                    TOGETHER,
                )
    tl.store(Y + rows, tl.sum(total, 1).to(Y.dtype.element_ty), mask=rows < num_rows)


@jit
def matvec_cores(  # type: ignore[no-untyped-def]
    X,
    W,
    S,
    Z,
    Y,
    num_tokens,
    num_rows,
    num_columns,
    num_words,
    num_groups,
    num_chunks,
    RAISED,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    CENTRE: tl.constexpr,
    HAS_Z: tl.constexpr,
    PRODUCT: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    SPAN: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Some rows times all tokens a program, over some chunks of `PACKED` columns, each in spans of
    one group.
    """
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    own = tl.minimum(rows, num_rows - 1)
    tokens = tl.arange(0, TOKENS)
    total = tl.zeros((ROWS, TOKENS), tl.float32)
    first = tl.program_id(1) * num_chunks
    for chunk in tl.range(
        first, tl.minimum(first + num_chunks, tl.cdiv(num_columns, PACKED)), num_stages=3
    ):
        if BITS == 4:
            words = chunk * 16 + tl.arange(0, 16)
            stored = tl.load(W + own[:, None] * num_words + words[None, :]).to(
                tl.uint32, bitcast=True
            )
        for g in tl.static_range(PACKED // SPAN):
            columns = chunk * PACKED + g * SPAN + tl.arange(0, SPAN)
            here = (columns < num_columns)[:, None] & (tokens < num_tokens)[None, :]
            x = tl.load(X + tokens[None, :] * num_columns + columns[:, None], mask=here, other=0.0)
            if BITS == 8:
                at = W + own[:, None] * num_columns + columns[None, :]
                number = _byte(tl.load(at, mask=(columns < num_columns)[None, :], other=0))
            else:
                place = (g * (SPAN // 16) + tl.arange(0, SPAN // 16)) * 4
                number = ((stored[:, None, :] >> place[None, :, None]) & 15) | RAISED
                number = number.to(tl.float32, bitcast=True).reshape(ROWS, SPAN) - (2.0**23 + 8.0)
            part = tl.dot(number.to(PRODUCT), x.to(PRODUCT))
            group = own * num_groups + tl.minimum(
                (chunk * PACKED + g * SPAN) // GROUP, num_groups - 1
            )
            if HAS_Z:
                zero = tl.load(Z + group).to(tl.float32) - CENTRE
                part -= zero[:, None] * tl.sum(x.to(tl.float32), 0)[None, :]
            total += part * tl.load(S + group).to(tl.float32)[:, None]
    Y += tl.program_id(1).to(tl.int64) * num_tokens * num_rows
    here = (rows < num_rows)[:, None] & (tokens < num_tokens)[None, :]
    tl.store(
        Y + tokens[None, :] * num_rows + rows[:, None], total.to(Y.dtype.element_ty), mask=here
    )


@jit
def _byte(stored):  # type: ignore[no-untyped-def]
    # The same bits set and, as -128 is to be the least, the highest of the byte turned.
    raised = stored.to(tl.uint8, bitcast=True).to(tl.uint32) ^ (0x4B000000 + 128)
    return raised.to(tl.float32, bitcast=True) - (2.0**23 + 128.0)


@jit
def _half_byte(stored, PLACE: tl.constexpr, RAISED):  # type: ignore[no-untyped-def]
    # Where it lies, not shifted: its power of two is taken off together with 2**23.
    raised = ((stored & (15 << PLACE)) | RAISED).to(tl.float32, bitcast=True)
    return raised * 2.0**-PLACE - (2.0 ** (23 - PLACE) + 8.0)


@jit
def _scaled(  # type: ignore[no-untyped-def]
    part,
    x,
    S,
    Z,
    rows,
    groups,
    num_rows,
    num_groups,
    CENTRE: tl.constexpr,
    HAS_Z: tl.constexpr,
    WIDE: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    """Sums of `TOGETHER` neighbours of `part` [rows, words], which is x times numbers as if
    `CENTRE` were zero.
    """
    part = tl.sum(part.reshape(part.shape[0], part.shape[1] // TOGETHER, TOGETHER), 2)
    at = rows[:, None] * num_groups + groups[None, :]
    here = (rows < num_rows)[:, None] & (groups < num_groups)[None, :]
    if HAS_Z:
        zero = tl.load(Z + at, mask=here, other=0.0).to(WIDE) - CENTRE
        part -= zero * tl.sum(x.reshape(x.shape[0] // TOGETHER, TOGETHER), 1)[None, :]
    return part * tl.load(S + at, mask=here, other=0.0).to(WIDE)


# ---- without Triton: the same by a compiler ------------------------------------------------------


@compiled
def _bytes_product(
    x_MGS: Tensor, values_NGS: Tensor, scales: Tensor, zeros: Tensor | None, num_tokens: int
) -> Tensor:
    """Of groups side by side; scales and zeros [N, groups, 1]. Every token has its own sum over the
    one weight.
    """
    weight = values_NGS.to(x_MGS.dtype)
    weight = (weight if zeros is None else weight - zeros) * scales
    return torch.stack([(x_MGS[i] * weight).sum((1, 2)) for i in range(num_tokens)])


@compiled
def _half_bytes_product(
    x_MK: Tensor,
    words: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    per_pack: int,
    num_tokens: int,
) -> Tensor:
    """Of whole `PACKED`, `per_pack` groups of each. Shapes are numbers, for what is divided by a
    size is slow.
    """
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=words.device).view(
        per_pack, 8 // per_pack, 1
    )
    numbers = (words.view(len(words), -1, 1, 1, PACKED // 8) >> shifts & 15).to(x_MK.dtype)
    shape = len(words), -1, per_pack, 1, 1
    weight = (numbers - (CENTRE[4] if zeros is None else zeros.view(shape))) * scales.view(shape)
    x = x_MK.view(num_tokens, -1, per_pack, 8 // per_pack, PACKED // 8)
    return torch.stack([(x[i] * weight).sum((1, 2, 3, 4)) for i in range(num_tokens)])


def _by_processor(x_MK: Tensor, weight: Quantised) -> Tensor:
    """Few tokens by a compiler."""
    values, scales, group, bits, zeros = weight
    x = x_MK.to(wide_dtype(x_MK))
    if bits == 8:
        x_MGS, values_NGS = x.unflatten(-1, (-1, group)), values.unflatten(-1, (-1, group))
        zeros = None if zeros is None else zeros.unsqueeze(-1)
        return _bytes_product(x_MGS, values_NGS, scales.unsqueeze(-1), zeros, len(x)).to(x_MK.dtype)
    per_pack = PACKED // group
    x = F.pad(x, (0, -x.shape[-1] % PACKED))
    scales = F.pad(scales, (0, -scales.shape[-1] % per_pack))
    zeros = None if zeros is None else F.pad(zeros, (0, -zeros.shape[-1] % per_pack))
    return _half_bytes_product(x, words_of(values), scales, zeros, per_pack, len(x)).to(x_MK.dtype)


def _by_rows(x_MK: Tensor, weight: Quantised) -> Tensor:
    """Many tokens: the weight widened some rows at a time."""
    y = x_MK.new_empty(len(x_MK), len(weight.values))
    step = max(1, WIDENED // x_MK.shape[-1])
    for start in range(0, y.shape[1], step):
        own = slice(start, start + step)
        zeros = None if weight.zeros is None else weight.zeros[own]
        part = weight._replace(values=weight.values[own], scales=weight.scales[own], zeros=zeros)
        with torch.autocast(x_MK.device.type, enabled=False):
            y[:, own] = F.linear(x_MK, dequantise(part).to(x_MK.dtype))
    return y


# ---- the operator --------------------------------------------------------------------------------


def matvec(x: Tensor, weight: Quantised, kernels: str = "fused") -> Tensor:
    """x [..., K] times a quantised weight [N, K]: [..., N] in x's dtype.

    `kernels` is the plan's: compiled, or fused, which is Triton where that runs. Raises ValueError
    naming the tensor whose device, dtype or shape is not right, or that requires a gradient, for
    there is none.
    """
    values, scales, group, bits, zeros = weight
    check("matvec", "x", x=x, values=values, scales=scales, zeros=zeros)
    check_form("matvec", x.shape[-1], group, bits)
    for name, y in (("x", x), ("scales", scales), ("zeros", zeros)):
        if y is not None and y.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"matvec: {name} requires a gradient, and there is none; legal: under "
                f"torch.no_grad()"
            )
    stored, width = (
        (torch.int8, x.shape[-1])
        if bits == 8
        else (torch.uint8, -(-x.shape[-1] // PACKED) * PACKED // 2)
    )
    if values.dtype != stored:
        raise ValueError(f"matvec: values of {bits} bits are {values.dtype}; legal: {stored}")
    check_shape("matvec", "values", values, (len(values), width))
    check_shape("matvec", "scales", scales, (len(values), x.shape[-1] // group))
    check_shape("matvec", "zeros", zeros, tuple(scales.shape))
    return matvec_op(x, values, scales, zeros, group, bits, kernels)


@custom_op("workbench::matvec", mutates_args=())
def matvec_op(
    x: Tensor,
    values: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    group: int,
    bits: int,
    kernels: str,
) -> Tensor:
    """x [..., K] times a quantised weight, [..., N]."""
    x_MK = rows_of(x)
    shape = *x.shape[:-1], len(values)
    weight = Quantised(
        values.contiguous(),
        scales.contiguous(),
        group,
        bits,
        None if zeros is None else zeros.contiguous(),
    )
    if not x_MK.numel() or not len(values):
        return x.new_zeros(shape)
    if len(x_MK) > MOST_TOKENS:
        return _by_rows(x_MK, weight).view(shape)
    if kernels == "fused" and runs_triton(x.device):
        several = len(x_MK) > 1 and x.element_size() == 2 and scales.dtype != torch.float64
        return (_by_cores if several else _by_threads)(x_MK, weight).view(shape)
    return _by_processor(x_MK, weight).view(shape)


@matvec_op.register_fake
def _(
    x: Tensor,
    values: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    group: int,
    bits: int,
    kernels: str,
) -> Tensor:
    return x.new_empty(*x.shape[:-1], len(values))


def _by_threads(x_MK: Tensor, weight: Quantised) -> Tensor:
    words, form = _form(weight)
    y = x_MK.new_empty(len(x_MK), len(words))
    each = 512 if weight.bits == 8 else 128  # words of a warp: 16 bytes a thread
    num_warps = min(4, next_power_of_2(-(-words.shape[-1] // each)))
    matvec_threads[(-(-len(words) // 4), len(x_MK))](
        x_MK,
        words,
        weight.scales,
        weight.zeros,
        y,
        len(words),
        x_MK.shape[-1],
        words.shape[-1],
        weight.scales.shape[-1],
        RAISED,
        WIDE=wide(x_MK),
        ROWS=4,
        BLOCK=each * num_warps,
        TOGETHER=each // 32,
        num_warps=num_warps,
        **form,
    )
    return y


def _by_cores(x_MK: Tensor, weight: Quantised) -> Tensor:
    words, form = _form(weight)
    (num_tokens, num_columns), num_rows = x_MK.shape, len(words)
    # Where rows alone do not fill the device, columns are shared out, and their sums added up
    # afterwards.
    row_programs, chunks = -(-num_rows // 32), -(-num_columns // PACKED)
    num_chunks = -(-chunks // min(-(-programs(x_MK.device, 8) // row_programs), -(-chunks // 2)))
    splits = -(-chunks // num_chunks)
    y = torch.empty(
        splits,
        num_tokens,
        num_rows,
        dtype=x_MK.dtype if splits == 1 else torch.float32,
        device=x_MK.device,
    )
    matvec_cores[(row_programs, splits)](
        x_MK,
        words,
        weight.scales,
        weight.zeros,
        y,
        num_tokens,
        num_rows,
        num_columns,
        words.shape[-1],
        weight.scales.shape[-1],
        num_chunks,
        RAISED,
        PRODUCT=_product_dtype(x_MK),
        ROWS=32,
        TOKENS=16,
        SPAN=min(form["GROUP"], PACKED),
        num_warps=2,
        **form,
    )
    return y[0] if splits == 1 else y.sum(0).to(x_MK.dtype)


def _product_dtype(x: Tensor) -> Any:
    """What tensor cores are given: x's own, but that the interpreter would multiply the bits of
    bf16.
    """
    return tl.float32 if INTERPRETED else tl.bfloat16 if x.dtype == torch.bfloat16 else tl.float16


def _form(weight: Quantised) -> tuple[Tensor, dict[str, int]]:
    """What is loaded at once, int8 or words, and how a kernel reads it."""
    bits, group = weight.bits, weight.group
    words = weight.values if bits == 8 else words_of(weight.values)
    form = {
        "BITS": bits,
        "CENTRE": CENTRE[bits],
        "HAS_Z": weight.zeros is not None,
        "PACKED": PACKED,
    }
    # Any column of a row with one scale is of group 0.
    return words, {**form, "GROUP": group if group in GROUPS else 2**30}
