"""INT8 and INT4 weights and their GEMV without Triton: rounding errors, packed values, refusals."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from workbench.kernels.weight_only_gemv import (
    QuantizedWeight,
    dequantize_weight,
    quantize_weight,
    reference,
    weight_only_gemv,
)
from workbench.kernels.weight_only_gemv import matvec_op as operator

DTYPES = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 8e-3}


@pytest.mark.parametrize(("bits", "group"), [(8, None), (8, 32), (4, 32), (4, 64), (4, 128)])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16], ids=str)
def test_rounding_is_to_the_nearest(bits: int, group: int | None, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = torch.randn(7, 384, dtype=torch.float64).to(dtype)
    own = quantize_weight(weight, bits, group)
    assert own.scales.dtype == dtype and own.scales.shape == (7, 384 // own.group)
    assert own.values.nbytes == 7 * 384 * bits // 8
    scales = own.scales.double().repeat_interleave(own.group, -1)
    found = dequantize_weight(own._replace(scales=own.scales.double()))
    error = (found - weight.double()).abs()
    # Beside half a unit, what the scale's own rounding cuts off at the ends.
    cut = (2 ** (bits - 1) - 1) * torch.finfo(dtype).eps
    assert (error <= scales * (0.5 + cut)).all()
    assert error.max() > 0.4 * scales.min()
    assert torch.equal(dequantize_weight(own), found.to(dtype))


def test_zeros_and_values_too_small_for_a_scale_stay_zero() -> None:
    weight = torch.zeros(2, 64, dtype=torch.float16)
    weight[1, 3] = 6e-8
    for bits in (8, 4):
        assert not dequantize_weight(quantize_weight(weight, bits, 32)).any()


def test_int4_values_are_packed_as_documented() -> None:
    weight = torch.zeros(1, 160)
    weight[0, 16 * 5 + 3], weight[0, 128 + 16 + 2] = 7.0, -7.0
    words = quantize_weight(weight, 4, 32).values.view(torch.int32)[0].tolist()
    plain = int.from_bytes(bytes([0x88] * 4), "little", signed=True)
    assert len(words) == 32 and [i for i, word in enumerate(words) if word != plain] == [3, 18]
    assert words[3] >> 20 & 15 == 15 and words[18] >> 4 & 15 == 1


@pytest.mark.parametrize(
    ("bits", "group", "columns"), [(8, None, 333), (8, 64, 192), (4, 32, 160), (4, 128, 256)]
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_many_tokens_widen_the_weight(
    bits: int, group: int | None, columns: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workbench.kernels.weight_only_gemv.DEQUANTIZE_NUMEL", 1000)
    x, weight = drawn(9, 11, columns, bits, group, dtype)
    y, true = weight_only_gemv(x, weight), reference(x, weight)
    assert y.dtype == dtype
    # Here the weight itself is rounded to x's dtype.
    assert (y.double() - true).abs().max() <= 2 * DTYPES[dtype] * true.abs().max()


@pytest.mark.parametrize(
    ("bits", "group", "num_tokens", "dtype"),
    [
        (8, None, 1, torch.float32),
        (8, 32, 3, torch.bfloat16),
        (4, 32, 1, torch.bfloat16),
        (4, 64, 8, torch.float64),
    ],
)
@pytest.mark.parametrize("kernels", ["compiled", "fused"])
def test_few_tokens_equal_the_widened_weight(
    bits: int, group: int | None, num_tokens: int, dtype: torch.dtype, kernels: str
) -> None:
    for rows, columns in ((5, 192), (37, 320)):
        x, weight = drawn(num_tokens, rows, columns, bits, group, dtype)
        own = weight._replace(zeros=weight.zeros if bits == 4 else None)
        y, true = weight_only_gemv(x, own, kernels), reference(x, own)
        assert y.dtype == dtype and y.is_contiguous()
        assert (y.double() - true).abs().max() <= DTYPES[dtype] * true.abs().max()


def drawn(
    num_tokens: int, rows: int, columns: int, bits: int, group: int | None, dtype: torch.dtype
) -> tuple[Tensor, QuantizedWeight]:
    generator = torch.Generator().manual_seed(0)
    x, weight = (
        torch.randn(n, columns, generator=generator, dtype=torch.float64)
        for n in (num_tokens, rows)
    )
    own = quantize_weight(weight.to(dtype), bits, group)
    zeros = torch.rand(own.scales.shape, generator=generator, dtype=torch.float64) * 4 + (
        6 if bits == 4 else -2
    )
    return x.to(dtype), own._replace(zeros=zeros.to(dtype))


def test_fake_tensors_know_the_product_and_there_is_no_gradient() -> None:
    x, weight = drawn(9, 6, 128, 4, 64, torch.float32)
    torch.library.opcheck(operator, (x, *weight[:2], weight.zeros, 64, 4, "fused"))
    with FakeTensorMode(allow_non_fake_inputs=True):
        y = weight_only_gemv(torch.empty(2, 3, 128, dtype=torch.bfloat16), weight)
        assert y.shape == (2, 3, 6) and y.dtype == torch.bfloat16
    for name, own, w in (
        ("x", x.clone().requires_grad_(), weight),
        ("scales", x, weight._replace(scales=weight.scales.clone().requires_grad_())),
    ):
        with pytest.raises(
            ValueError, match=f"weight_only_gemv: {name} requires a gradient, and there is none"
        ):
            weight_only_gemv(own, w)
        with torch.no_grad():
            assert torch.equal(weight_only_gemv(own, w), weight_only_gemv(x, weight))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: {"values": w.values.to("meta")}, "values is on meta, but x on cpu"),
        (lambda w: {"bits": 3}, "bits is 3; legal: 8, 4"),
        (lambda w: {"group": 48}, r"group is 48 of 192 columns; legal: \[32, 64\]"),
        (
            lambda w: {"values": w.values.to(torch.int8)},
            "values of 4 bits are torch.int8; legal: torch.uint8",
        ),
        (lambda w: {"values": w.values[:, 1:]}, r"values has shape \(5, 127\); legal: \(5, 128\)"),
        (lambda w: {"scales": w.scales[1:]}, r"scales has shape \(4, 3\); legal: \(5, 3\)"),
        (lambda w: {"zeros": w.scales[:, 1:]}, r"zeros has shape \(5, 2\); legal: \(5, 3\)"),
        (
            lambda w: {"scales": w.scales.to(torch.float8_e5m2)},
            "scales is float8_e5m2; legal: float64",
        ),
    ],
)
def test_illegal_arguments_are_refused_by_name(
    change: Callable[[QuantizedWeight], dict[str, object]], message: str
) -> None:
    x, weight = drawn(2, 5, 192, 4, 64, torch.float32)
    with pytest.raises(ValueError, match=f"weight_only_gemv: {message}"):
        weight_only_gemv(x, weight._replace(**change(weight)))


def test_weights_that_cannot_be_quantised_are_refused() -> None:
    for bits, group, columns, message in (
        (2, 32, 64, "bits is 2; legal: 8, 4"),
        (4, None, 96, r"group is 96 of 96 columns; legal: \[32\]"),
        (4, 32, 100, r"group is 32 of 100 columns; legal: none of them"),
        (8, 64, 96, r"group is 64 of 96 columns; legal: \[32, 96\]"),
        (8, None, 0, r"group is 0 of 0 columns; legal: none of them"),
    ):
        with pytest.raises(ValueError, match=f"quantize_weight: {message}"):
            quantize_weight(torch.ones(1, columns), bits, group)
    with pytest.raises(
        ValueError, match=r"quantize_weight: weight has 3 dimensions; legal: 2, \[N, K\]"
    ):
        quantize_weight(torch.ones(2, 2, 32), 8)


def test_half_bytes_may_begin_anywhere() -> None:
    x, weight = drawn(2, 5, 256, 4, 64, torch.float32)
    whole = torch.zeros(5 * 128 + 3, dtype=torch.uint8)
    moved = weight._replace(values=whole[3:].view(5, 128).copy_(weight.values))
    assert torch.equal(weight_only_gemv(x, moved), weight_only_gemv(x, weight))
    assert torch.equal(dequantize_weight(moved), dequantize_weight(weight))
