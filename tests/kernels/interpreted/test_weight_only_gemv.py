"""INT8 and INT4 GEMV by the interpreter, against the dequantized weight in fp64."""

import pytest
import torch
from torch import Tensor

from tests.kernels.canaries import canaries
from workbench.kernels.weight_only_gemv import (
    QuantizedWeight,
    quantize_weight,
    reference,
    weight_only_gemv,
)

TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
"""Of the largest entry; the interpreter cuts off what bf16 has no room for."""
FORMS = {
    "8 bits by row": (8, None, (33, 131)),
    "8 bits by row, columns of several blocks": (8, None, (5, 2085)),
    "8 bits in groups": (8, 32, (6, 96)),
    "4 bits in groups of 128": (4, 128, (7, 640)),
    "4 bits in groups of 64, the last alone": (4, 64, (3, 192)),
    "4 bits in groups of 32, columns of several blocks": (4, 32, (3, 4128)),
    "4 bits, less than is packed together": (4, 32, (9, 32)),
}


def drawn(form: str, dtype: torch.dtype, zeros: bool) -> tuple[Tensor, QuantizedWeight]:
    """Eight tokens and a weight for them."""
    bits, group, shape = FORMS[form]
    generator = torch.Generator().manual_seed(0)
    x, weight = (
        torch.randn(*s, generator=generator, dtype=torch.float64) for s in ((8, shape[1]), shape)
    )
    own = quantize_weight(weight.to(dtype), bits, group)
    about = torch.rand(own.scales.shape, generator=generator, dtype=torch.float64) * 4 + (
        6 if bits == 4 else -2
    )
    return x.to(dtype), own._replace(zeros=about.to(dtype)) if zeros else own


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_equals_the_widened_weight(form: str, dtype: torch.dtype, zeros: bool) -> None:
    x, weight = drawn(form, dtype, zeros)
    for num_tokens in (1, 3):
        with canaries():
            y = weight_only_gemv(x[:num_tokens], weight)
        true = reference(x[:num_tokens], weight)
        assert y.dtype == dtype and y.shape == true.shape
        assert (y.double() - true).abs().max() <= TOLERANCE[dtype] * true.abs().max()


@pytest.mark.parametrize("num_tokens", range(1, 9))
def test_any_few_tokens(num_tokens: int) -> None:
    for form, dtype in (
        ("8 bits in groups", torch.float16),
        ("4 bits in groups of 64, the last alone", torch.float32),
    ):
        x, weight = drawn(form, dtype, False)
        y, true = weight_only_gemv(x[:num_tokens], weight), reference(x[:num_tokens], weight)
        assert (y.double() - true).abs().max() <= TOLERANCE[dtype] * true.abs().max()


@pytest.mark.parametrize("bits", [8, 4])
def test_columns_are_shared_out_where_rows_are_few(
    bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight = drawn(
        "8 bits by row, columns of several blocks" if bits == 8 else "4 bits in groups of 128",
        torch.float16,
        True,
    )
    found = []
    for num_programs in (1, 2, 64):
        monkeypatch.setattr(
            "workbench.kernels.weight_only_gemv.device_programs", lambda *_, n=num_programs: n
        )
        found.append(weight_only_gemv(x, weight))
    true = reference(x, weight)
    for y in found:
        assert (y.double() - true).abs().max() <= TOLERANCE[torch.float16] * true.abs().max()


def test_every_number_there_is() -> None:
    for bits, least, most in ((8, -128, 127), (4, 0, 15)):
        numbers = torch.arange(least, most + 1)
        if bits == 8:
            values = numbers.to(torch.int8).expand(3, -1).contiguous()
        else:
            numbers = numbers.repeat(8)
            words = sum(numbers.view(8, 16)[i].long() << 4 * i for i in range(8))
            assert isinstance(words, Tensor)
            values = words.to(torch.int32).expand(3, -1).contiguous().view(torch.uint8)
        group = len(numbers) if bits == 8 else 128
        weight = QuantizedWeight(values, torch.ones(3, 1), group, bits)
        for dtype in (torch.float32, torch.float16):
            one = torch.eye(len(numbers), dtype=dtype)
            for some in one.split(8):
                y = weight_only_gemv(some, weight)
                expected = numbers[some.argmax(1)] - (8 if bits == 4 else 0)
                assert torch.equal(y, expected.to(dtype).unsqueeze(1).expand(-1, 3))


def test_strided_tokens_and_nothing() -> None:
    x, weight = drawn("8 bits by row", torch.float32, False)
    turned = torch.randn(131, 2, 3).permute(2, 1, 0)
    assert torch.allclose(
        weight_only_gemv(turned, weight).double(), reference(turned, weight), atol=1e-4
    )
    assert weight_only_gemv(x[:0], weight).shape == (0, 33)
    assert weight_only_gemv(x[0], weight).shape == (33,)
