"""Weights in NF4 and INT4: levels, round trips, and independence of how a weight is sharded."""

import math

import pytest
import torch
from scipy.stats import norm
from torch import Tensor

from workbench.kernels.four_bit_weight import (
    NF4_LEVELS,
    FourBitWeight,
    dequantize_four_bit,
    quantize_four_bit,
    reference,
    scales_of,
)
from workbench.kernels.weight_quantization import dequantize_weight, quantize_weight
from workbench.runtime_facts.four_bit_sizes import FourBitFormat

FORMS = [
    FourBitFormat(name, group, double)
    for name, group in (("nf4", 64), ("nf4", 32), ("int4", 128), ("int4", 32))
    for double in (False, True)
]


def drawn(*shape: int, scale: float = 0.02) -> Tensor:
    """A normal weight, a few of whose columns and rows are larger, and one group is zero."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * scale
    weight[..., 5] *= 8
    weight[..., 1, :] *= 30
    weight[..., 2, :128] = 0
    return weight


def test_levels_are_quantiles_of_the_normal_distribution() -> None:
    # Appendix E: 9 quantiles above zero and 8 below it, equally spaced in probability between 1/2
    # and 1 - (1/32 + 1/30) / 2, both of which include the zero.
    outermost = 1 - (1 / 32 + 1 / 30) / 2
    upper = norm.ppf([0.5 + i * (outermost - 0.5) / 8 for i in range(9)])
    lower = norm.ppf([0.5 + i * (outermost - 0.5) / 7 for i in range(8)])
    levels = [*(-lower[:0:-1] / lower[-1]), *(upper / upper[-1])]
    assert len(set(NF4_LEVELS)) == 16 and NF4_LEVELS[7] == 0.0
    assert pytest.approx(levels, abs=2e-6) == NF4_LEVELS


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_every_value_goes_to_its_nearest_level(form: FourBitFormat) -> None:
    weight = drawn(6, 256)
    own = quantize_four_bit(weight, form)
    back, scales = reference(own), scales_of(own).repeat_interleave(form.group, -1)
    levels = torch.tensor(NF4_LEVELS if form.name == "nf4" else [float(n) for n in range(-7, 8)])
    nearest = (weight[..., None] - scales[..., None] * levels).abs().amin(-1)
    assert torch.allclose((back - weight).abs(), nearest, rtol=0, atol=1e-6 * float(weight.max()))
    assert (back[2, :128] == 0).all()
    # Scales are exact, or at most a 255th of the row's largest above.
    largest = weight.unflatten(-1, (-1, form.group)).abs().amax(-1)
    exact = largest / (1 if form.name == "nf4" else 7)
    above = (scales_of(own) - exact) / exact.amax(-1, keepdim=True)
    assert (above > -1e-6).all() and float(above.max()) <= (1 / 255 + 1e-6 if form.double else 1e-6)


def test_error_of_normal_weights() -> None:
    """Root mean squares of the error over that of the weight: the levels' own on the normal
    distribution; double quantization adds less than a 50th.
    """
    weight = torch.randn(512, 1024, generator=torch.Generator().manual_seed(1))
    found = {
        form: float((reference(quantize_four_bit(weight, form)) - weight).norm() / weight.norm())
        for form in (FourBitFormat("nf4", 64, False), FourBitFormat("nf4", 64, True))
    }
    single, double = found.values()
    assert 0.08 < single < 0.1 and single < double < 1.02 * single
    int4 = float(
        (reference(quantize_four_bit(weight, FourBitFormat("int4", 64, False))) - weight).norm()
        / weight.norm()
    )
    assert single < int4  # what NF4 is for


@pytest.mark.parametrize("group", [32, 64, 128])
def test_int4_is_that_of_the_gemv(group: int) -> None:
    weight = drawn(6, 256)
    theirs = dequantize_weight(quantize_weight(weight, 4, group))
    assert torch.equal(
        reference(quantize_four_bit(weight, FourBitFormat("int4", group, False))), theirs
    )


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_rows_and_groups_are_quantized_alone(form: FourBitFormat) -> None:
    """Bytes of a shard are the shard of the bytes: of rows, and without double quantization of
    groups.
    """
    weight = drawn(6, 256)
    own = quantize_four_bit(weight, form)
    for rows in (slice(0, 1), slice(1, 4), slice(4, 6)):
        _equal(
            quantize_four_bit(weight[rows], form),
            [part[rows] for part in own[:3] if part is not None],
        )
    if not form.double:
        part = quantize_four_bit(weight[:, 128:], form)
        _equal(part, [own.numbers[:, 64:], own.scales[:, form.scale_bytes(128) :]])


def _equal(weight: FourBitWeight, parts: list[Tensor]) -> None:
    for mine, theirs in zip([part for part in weight[:3] if part is not None], parts, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_dequantized_is_the_reference_rounded_once(form: FourBitFormat, dtype: torch.dtype) -> None:
    for shape in ((5, 256), (3, 7, 128), (0, 128)):
        own = quantize_four_bit(torch.zeros(shape) if not shape[0] else drawn(*shape), form)
        found = dequantize_four_bit(own, dtype)
        assert found.shape == shape and found.dtype == dtype
        assert torch.equal(found, reference(own).to(dtype))


def test_a_large_weight_is_looked_up_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    own = quantize_four_bit(drawn(11, 128), FORMS[0])
    monkeypatch.setattr("workbench.kernels.four_bit_weight.DEQUANTIZE_NUMEL", 3 * 128)
    assert torch.equal(dequantize_four_bit(own, torch.float32), reference(own))


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_sizes(form: FourBitFormat) -> None:
    own = quantize_four_bit(drawn(6, 256), form)
    assert sum(part.nbytes for part in own[:3] if part is not None) == 6 * form.row_bytes(256)


def test_bits_per_parameter() -> None:
    """The paper's 4.5 and 4.127 (section 3)."""
    assert FourBitFormat("nf4", 64, False).bits_per_parameter(4096) == 4.5
    assert math.isclose(FourBitFormat("nf4", 64, True).bits_per_parameter(4096), 4.1328125)


def test_zeros_stay_zero() -> None:
    """Padding of shards: zero bytes are zeros, and so is what is quantized from zeros."""
    for form in FORMS:
        own = quantize_four_bit(torch.zeros(2, 128), form)
        assert (dequantize_four_bit(own, torch.float32) == 0).all()
        parts = [None if part is None else torch.zeros_like(part) for part in own[:3]]
        assert (dequantize_four_bit(FourBitWeight(*parts, form), torch.float32) == 0).all()


def test_refusals_name_what_is_legal() -> None:
    with pytest.raises(ValueError, match=r"group is 64 of 96 columns; legal: \[32\]"):
        quantize_four_bit(torch.zeros(2, 96), FourBitFormat("nf4", 64, False))
    with pytest.raises(ValueError, match="group is 64 of 31 columns; legal: none"):
        quantize_four_bit(torch.zeros(2, 31), FourBitFormat("nf4", 64, False))
    own = quantize_four_bit(torch.zeros(2, 128), FORMS[0])
    with pytest.raises(ValueError, match=r"scales has shape \(2, 4\); legal: \(2, 8\)"):
        dequantize_four_bit(own._replace(scales=own.scales[:, :4]), torch.float32)
    with pytest.raises(ValueError, match=r"row_factors of .* are not bytes"):
        dequantize_four_bit(
            quantize_four_bit(torch.zeros(2, 128), FORMS[1])._replace(row_factors=None),
            torch.float32,
        )
    with pytest.raises(ValueError, match="scales is on meta, but numbers on cpu; legal: one"):
        dequantize_four_bit(own._replace(scales=own.scales.to("meta")), torch.float32)
    with pytest.raises(ValueError, match=r"numbers are torch\.int8; legal: torch\.uint8"):
        dequantize_four_bit(own._replace(numbers=own.numbers.view(torch.int8)), torch.float32)
