"""Dequantization of NF4 and INT4 by the interpreter, against the plain operators."""

import pytest
import torch

from tests.kernels.canaries import canaries
from workbench.kernels.four_bit_weight import dequantize_four_bit, quantize_four_bit, reference
from workbench.runtime_facts.four_bit_sizes import FourBitFormat


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("name, group", [("nf4", 64), ("int4", 128), ("int4", 32)])
def test_equals_the_reference(name: str, group: int, double: bool, dtype: torch.dtype) -> None:
    form = FourBitFormat(name, group, double)
    # Less than one program, several, and stacked weights; rows end within programs.
    for shape in ((1, 128), (13, 640), (2, 3, 896)):
        weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        own = quantize_four_bit(weight, form)
        with canaries():
            found = dequantize_four_bit(own, dtype)
        assert torch.equal(found, reference(own).to(dtype))
