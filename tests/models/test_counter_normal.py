"""Normal numbers by counter: any box draws its part of the whole, with IEEE arithmetic only, and
they are normal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from workbench.models.counter_hash import column_counters, random_bits, row_keys
from workbench.models.counter_normal import CPU_CHUNK_NUMEL, GPU_CHUNK_NUMEL, NormalDrawer
from workbench.models.weight_init import seed_of

CPU = torch.device("cpu")
KEY = seed_of("blocks.0.mlp.up.weight", 0)
Slices = Sequence[tuple[int, int]]


def draw(
    shape: Sequence[int],
    slices: Slices | None = None,
    *,
    key: int = KEY,
    deviation: float = 1.0,
    chunk_numel: int = CPU_CHUNK_NUMEL,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    slices = slices or [(0, length) for length in shape]
    into = torch.empty([stop - start for start, stop in slices], dtype=dtype)
    NormalDrawer(CPU, chunk_numel).fill(into, slices, shape, key, deviation)
    return into


BOXES = [
    ((9, 257), [(0, 9), (0, 257)]),
    ((9, 257), [(2, 7), (1, 2)]),
    ((9, 257), [(8, 9), (256, 257)]),
    ((9, 257), [(0, 1), (17, 202)]),
    ((3, 5, 20), [(1, 3), (2, 4), (3, 20)]),
    ((2, 3, 4, 5), [(1, 2), (0, 3), (1, 4), (0, 5)]),
    ((31,), [(5, 30)]),
    ((), []),
]


@pytest.mark.parametrize("chunk_numel", [6, 64, 2**18])
@pytest.mark.parametrize("shape, slices", BOXES, ids=[str(slices) for _, slices in BOXES])
def test_a_box_is_drawn_as_in_the_whole(
    shape: tuple[int, ...], slices: Slices, chunk_numel: int
) -> None:
    whole = draw(shape)
    box = draw(shape, slices, chunk_numel=chunk_numel)
    assert torch.equal(box, whole[tuple(slice(*bounds) for bounds in slices)])


def test_strides_of_what_is_filled_do_not_matter() -> None:
    padded = torch.zeros(3, 10, 40).transpose(0, 1)
    part = padded[2:8, :, 1:38]
    NormalDrawer(CPU).fill(part, [(0, 6), (0, 3), (0, 37)], (6, 3, 37), KEY, 1.0)
    assert torch.equal(part, draw((6, 3, 37)))
    assert int((padded != 0).sum()) == part.numel()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_are_rounded_once_from_fp32(dtype: torch.dtype) -> None:
    assert torch.equal(draw((7, 50), dtype=dtype), draw((7, 50)).to(dtype))


def test_threads_change_no_bit() -> None:
    """With more threads a vector has other ends, where libraries compute otherwise."""
    one, threads = draw((600, 500)), torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert torch.equal(one, draw((600, 500)))
    finally:
        torch.set_num_threads(threads)


EXACT = {"add", "add_", "sub_", "mul", "mul_", "div_", "sqrt_", "copy_", "_to_copy"}
"""Operators of floats that IEEE 754 rounds to one result, each alone; and conversions."""


NO_ARITHMETIC = {
    "empty",
    "alias",
    "detach",
    "view",
    "slice",
    "unsqueeze",
    "split",
    "select",
    "_unsafe_view",
}


class FloatOperators(TorchDispatchMode):
    """Names of the operators that compute floats, and the factors `alpha` of additions."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.alphas: set[float] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        aliases = func.__name__.split(".")[0] in NO_ARITHMETIC
        if isinstance(out, Tensor) and out.is_floating_point() and not aliases:
            self.names.add(func.overloadpacket.__name__)
            self.alphas.add((kwargs or {}).get("alpha", 1))
        return out


def test_only_operators_that_every_device_rounds_alike_are_used() -> None:
    """What makes CPUs and GPUs draw the same bits. An `addcmul`, or a factor of an addition that is
    no power of two, is rounded once where it is fused and twice where it is not; a logarithm or
    cosine differs from library to library.
    """
    with FloatOperators() as seen:
        draw((20, 30))
    assert "mul_" in seen.names and "sqrt_" in seen.names
    assert seen.names <= EXACT, seen.names - EXACT
    assert all(math.frexp(abs(alpha))[0] == 0.5 for alpha in seen.alphas), seen.alphas


def in_fp64(shape: tuple[int, int], key: int) -> Tensor:
    """Box and Muller's transform of the same random bits with fp64's logarithms and cosines."""
    pairs = -(-shape[1] // 2)
    keys = row_keys(torch.arange(2 * shape[0]), key).view(-1, 2, 2)
    counters = column_counters(0, pairs, CPU)
    of_radius, of_angle = (random_bits(counters, keys[:, i]) for i in (0, 1))
    uniform = ((of_radius & 2**31 - 1).float() + 0.5).double() / 2**31
    radius = (-2 * uniform.log()).sqrt()
    eighth = (of_angle & 2**24 - 1).double() * 2**-24 * (math.pi / 4)
    swap = (of_angle >> 29 & 1).bool()
    first = torch.where(swap, eighth.sin(), eighth.cos()) * torch.where(of_angle < 0, -1, 1)
    second = torch.where(swap, eighth.cos(), eighth.sin())
    second = second * torch.where((of_angle >> 30 & 1).bool(), -1, 1)
    return torch.stack((first * radius, second * radius), -1).flatten(1)[:, : shape[1]]


def ulps(found: Tensor, expected: Tensor) -> Tensor:
    magnitude = expected.abs().float()
    ulp = torch.nextafter(magnitude, torch.tensor(math.inf)) - magnitude
    return (found.double() - expected).abs() / ulp.double()


@pytest.mark.parametrize("deviation", [1.0, 0.02, 0.02 / math.sqrt(64)])
def test_numbers_are_within_six_ulp_of_fp64(deviation: float) -> None:
    """Their relative error is below 6.25 x 2^-24: 2.5 of the radius, 1.75 of the angle, 1 of each
    of two products.
    """
    shape = (1024, 512)
    exact = in_fp64(shape, KEY) * float(torch.tensor(deviation, dtype=torch.float32))
    found = draw(shape, deviation=deviation)
    assert float(ulps(found, exact).max()) <= 6
    assert float(((found.double() - exact) / exact).abs().nan_to_num().max()) <= 6.25 * 2**-24


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_draws_the_bits_of_a_cpu() -> None:
    gpu = torch.device("cuda")
    into = torch.empty(1000, 1001, device=gpu)
    NormalDrawer(gpu, GPU_CHUNK_NUMEL).fill(into, [(0, 1000), (0, 1001)], (1000, 1001), KEY, 1)
    assert torch.equal(into.cpu(), draw((1000, 1001)))


NUMBERS = draw((2048, 512)).double()
N = NUMBERS.numel()


def test_moments_are_a_normal_distribution_s() -> None:
    """Within five standard deviations of each estimate."""
    assert abs(float(NUMBERS.mean())) < 5 / math.sqrt(N)
    assert abs(float(NUMBERS.var()) - 1) < 5 * math.sqrt(2 / N)
    assert abs(float((NUMBERS**3).mean())) < 5 * math.sqrt(15 / N)
    assert abs(float((NUMBERS**4).mean()) - 3) < 5 * math.sqrt(96 / N)


def test_the_distribution_is_normal_tails_included() -> None:
    values = NUMBERS.flatten().numpy()
    assert stats.kstest(values, "norm").pvalue > 1e-3
    for bound in (2.0, 3.0, 4.0):
        for tail in (values > bound, values < -bound):
            expected = N * stats.norm.sf(bound)
            assert abs(int(tail.sum()) - expected) < 5 * math.sqrt(expected), bound
    assert 4.5 < np.abs(values).max() < 6.7


def test_rows_and_columns_have_the_same_distribution() -> None:
    for dim in (0, 1):
        means = NUMBERS.mean(dim) * math.sqrt(NUMBERS.shape[dim])
        variances = (NUMBERS.var(dim) - 1) * math.sqrt(NUMBERS.shape[dim] / 2)
        assert float(means.abs().max()) < 5 and float(variances.abs().max()) < 6
        assert abs(float(means.var()) - 1) < 5 * math.sqrt(2 / len(means))


OTHERS = {
    "next column": lambda: NUMBERS.roll(1, 1),
    "next pair": lambda: NUMBERS.roll(2, 1),
    "columns 64 apart": lambda: NUMBERS.roll(64, 1),
    "next row": lambda: NUMBERS.roll(1, 0),
    "rows 2 apart": lambda: NUMBERS.roll(2, 0),
    "rows 1024 apart": lambda: NUMBERS.roll(1024, 0),
    "diagonal": lambda: NUMBERS.roll((1, 1), (0, 1)),
    "mirrored": lambda: NUMBERS.flip(1),
    "other layer": lambda: draw(NUMBERS.shape, key=seed_of("blocks.1.mlp.up.weight", 0)),
    "other tensor": lambda: draw(NUMBERS.shape, key=seed_of("blocks.0.mlp.gate.weight", 0)),
    "next seed": lambda: draw(NUMBERS.shape, key=seed_of("blocks.0.mlp.up.weight", 1)),
    "next key": lambda: draw(NUMBERS.shape, key=KEY + 1),
    "other rank": lambda: draw((4096, 512), [(2048, 4096), (0, 512)]),
    "other columns": lambda: draw((2048, 1024), [(0, 2048), (512, 1024)]),
}


@pytest.mark.parametrize("of", [lambda x: x, torch.abs, torch.square], ids=["z", "|z|", "z^2"])
@pytest.mark.parametrize("other", OTHERS)
def test_nothing_is_correlated(other: str, of: Any) -> None:
    """Numbers that are independent have no correlation of their magnitudes either: two that shared
    a radius would.
    """
    both = torch.stack((of(NUMBERS).flatten(), of(OTHERS[other]().double()).flatten()))
    assert abs(float(torch.corrcoef(both)[0, 1])) * math.sqrt(N) < 5
