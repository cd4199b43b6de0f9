"""Frozen weights in 4 bits: their GEMMs, and bytes that no mesh changes."""

import random
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from workbench.adapters.frozen_linear import four_bit_linear
from workbench.kernels.four_bit_weight import quantize_four_bit, reference
from workbench.parallel.four_bit import fill_four_bit as filling
from workbench.parallel.four_bit.apply_four_bit import part_layouts
from workbench.parallel.four_bit.fill_four_bit import StoredWeight, fill_four_bit, stored_matrices
from workbench.parallel.layout import Layout, Slices
from workbench.parallel.mesh import MeshAxis
from workbench.runtime_facts.four_bit_sizes import FourBitFormat

FORMS = [FourBitFormat("nf4", 64, True), FourBitFormat("nf4", 64, False)]
FORMS += [FourBitFormat("int4", 32, False)]
NAME = "blocks.0.mlp.down.weight"


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_equals_a_linear_on_the_dequantized_weight(form: FourBitFormat, bias: bool) -> None:
    weight = quantize_four_bit(drawn(5, 128), form)
    dense = reference(weight).double()
    x, b = drawn(2, 3, 128).requires_grad_(), drawn(5).requires_grad_() if bias else None
    other_x, other_b = (None if t is None else t.detach().clone().requires_grad_() for t in (x, b))
    assert other_x is not None
    y, expected = four_bit_linear(x, weight, b), F.linear(other_x, dense, other_b)
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-13)
    y.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(x.grad, other_x.grad, rtol=0, atol=1e-12)
    if b is not None and other_b is not None:
        torch.testing.assert_close(b.grad, other_b.grad, rtol=0, atol=1e-12)
    y = four_bit_linear(x, weight, b)
    y.add_(1)  # adapters add to it in place


def test_saves_only_the_stored_bytes() -> None:
    weight = quantize_four_bit(drawn(64, 128), FORMS[0])
    saved: list[int] = []

    def save(x: Tensor) -> Tensor:
        saved.append(x.nbytes)
        return x

    with torch.autograd.graph.saved_tensors_hooks(save, lambda x: x):
        four_bit_linear(drawn(3, 128).float().requires_grad_(), weight)
    assert sum(saved) == 64 * FORMS[0].row_bytes(128)


def local_layouts(shape: tuple[int, ...], dim: int | None, ranks: int) -> list[Layout]:
    layout = Layout.unsharded(NAME, shape)
    if dim is None:
        return [layout]
    axes = [MeshAxis("tensor", ranks, i, tuple(range(ranks)), None) for i in range(ranks)]
    return [layout.split(dim, axis) for axis in axes]


SHARDINGS: list[tuple[tuple[int, ...], int | None, int]] = [
    ((7, 256), None, 1),
    ((7, 256), 0, 3),
    ((7, 384), 1, 2),
    ((3, 5, 128), None, 1),
    ((3, 5, 128), 0, 2),
    ((3, 5, 384), 2, 3),
]
"""Shape of a weight, the dim that is sharded, and over how many ranks."""


@pytest.mark.parametrize("shape, dim, ranks", SHARDINGS)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_no_sharding_changes_the_bytes(
    form: FourBitFormat,
    shape: tuple[int, ...],
    dim: int | None,
    ranks: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tensor shards by rows, columns or stacked matrices, each cut anywhere by ZeRO, from few rows
    at a time.
    """
    monkeypatch.setattr(filling, "READ_NUMEL", 3 * shape[-1])
    weight, chance = drawn(*shape), random.Random(repr((form, shape, dim)))
    stored = quantize_four_bit(weight, form)
    read_columns = set()

    def read(into: Tensor, name: str, of: tuple[int, ...], slices: Slices) -> None:
        assert name == NAME and of == shape
        read_columns.add(slices[-1])
        into.copy_(weight[tuple(slice(*bounds) for bounds in slices)])

    for layout in local_layouts(shape, dim, ranks):
        parts = part_layouts(layout, form)
        found = {name: torch.zeros(p.local_shape, dtype=torch.uint8) for name, p in parts.items()}
        cuts = {name: _cuts(chance, local.numel()) for name, local in found.items()}
        for shard in range(3):
            own = {f"{NAME}.{name}": (name, *each[shard]) for name, each in cuts.items()}
            values = {key: found[name].view(-1)[i:j] for key, (name, i, j) in own.items()}
            layouts = {key: parts[name].flattened(i, j) for key, (name, i, j) in own.items()}
            matrices = stored_matrices(values, layouts, {NAME: StoredWeight(NAME, shape, form)})
            fill_four_bit(matrices, read, torch.float64)
        for name, part in parts.items():
            assert torch.equal(found[name], part.take(getattr(stored, name)))
    if not form.double and dim == len(shape) - 1:
        assert len(read_columns) >= ranks  # a rank reads its own columns


def _cuts(chance: random.Random, numel: int) -> list[tuple[int, int]]:
    return list(pairwise(sorted([0, numel, *(chance.randint(0, numel) for _ in range(2))])))


def test_a_rank_reads_only_the_rows_that_it_holds() -> None:
    form, boxes = FORMS[0], []
    layout = part_layouts(Layout.unsharded(NAME, (64, 128)), form)["numbers"]
    shard = torch.zeros(3 * 64, dtype=torch.uint8)  # rows 10, 11 and 12
    shards, layouts = {f"{NAME}.numbers": shard}, {f"{NAME}.numbers": layout.flattened(640, 832)}
    stored = {NAME: StoredWeight(NAME, (64, 128), form)}
    (matrix,) = stored_matrices(shards, layouts, stored)
    assert list(matrix.boxes()) == [((10, 13), (0, 128))]
    fill_four_bit([matrix], lambda into, name, of, slices: boxes.append(slices), torch.float32)
    assert boxes == [((10, 13), (0, 128))]
