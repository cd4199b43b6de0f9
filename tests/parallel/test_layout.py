"""Layouts: slices cover a tensor once, and taking and putting are inverse."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from workbench.parallel.layout import Layout
from workbench.parallel.mesh import Mesh, MeshAxis


def axis(name: str, size: int, index: int) -> MeshAxis:
    return MeshAxis(name, size, index, tuple(range(size)), None)


@given(
    rows=st.integers(1, 40),
    columns=st.integers(1, 5),
    size=st.integers(1, 8),
    dim=st.integers(0, 1),
)
def test_slices_of_all_ranks_make_the_tensor(rows: int, columns: int, size: int, dim: int) -> None:
    whole = torch.arange(rows * columns, dtype=torch.float64).view(rows, columns) + 1
    rebuilt = torch.zeros_like(whole)
    sizes = set()
    for index in range(size):
        layout = Layout.unsharded("w", (rows, columns)).split(dim, axis("tensor", size, index))
        local = layout.take(whole)
        assert local.shape == layout.local_shape
        assert local.sum() == sum(part.sum() for part, _ in layout.parts(local)), (
            "padding must be zero"
        )
        sizes.add(layout.local_shape)
        layout.put(local, rebuilt)
    assert torch.equal(rebuilt, whole)
    assert len(sizes) == 1, "every rank holds the same size"


@given(st.integers(1, 4), st.integers(1, 4), st.booleans(), st.booleans())
def test_every_entry_is_owned_once(tensor: int, data: int, split: bool, replica: bool) -> None:
    owned = 0
    for t in range(tensor):
        for d in range(data):
            axes = {"tensor": axis("tensor", tensor, t), "replicas": axis("replicas", data, d)}
            layout = Layout.unsharded("w", (12, 3), replica=replica)
            layout = layout.split(0, axes["tensor"]) if split else layout
            if layout.is_owner(Mesh(0, tensor * data, axes)):
                owned += layout.num_elements()
    assert owned == (0 if replica else 36)


@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=3),
    st.integers(1, 5),
    st.integers(1, 4),
    st.data(),
)
def test_flat_shards_of_padded_slices_make_the_tensor(
    shape: list[int], shards: int, ranks: int, data: st.DataObject
) -> None:
    dim = data.draw(st.integers(0, len(shape) - 1))
    whole = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape) + 1
    rebuilt, held = torch.zeros_like(whole), 0
    for index in range(ranks):
        local = Layout.unsharded("w", tuple(shape)).split(dim, axis("tensor", ranks, index))
        size = torch.Size(local.local_shape).numel()
        piece = -(-size // shards)
        for shard in range(shards):
            layout = local.flattened(min(shard * piece, size), min((shard + 1) * piece, size))
            mine = layout.take(whole)
            assert layout.flat is not None
            assert torch.equal(mine, local.take(whole).flatten()[layout.flat[0] : layout.flat[1]])
            layout.put(mine, rebuilt)
            held += layout.num_elements()
    assert torch.equal(rebuilt, whole)
    assert held == whole.numel()


@given(
    st.integers(1, 3), st.integers(1, 4), st.integers(1, 3), st.integers(1, 5), st.integers(0, 1)
)
def test_flat_shards_of_strided_slices_make_the_tensor(
    count: int, ranks: int, inner: int, shards: int, dim: int
) -> None:
    """Query, key and value packed (`count`), each sharded by heads."""
    stride = ranks * inner
    shape = (count * stride, 3) if dim == 0 else (3, count * stride)
    whole = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape) + 1
    rebuilt, held = torch.zeros_like(whole), 0
    for index in range(ranks):
        bounds = index * inner, (index + 1) * inner
        local = Layout.unsharded("w", shape).split_strided(dim, ("tensor",), bounds, count, stride)
        packed = whole.unflatten(dim, (count, ranks, inner)).select(dim + 1, index)
        assert torch.equal(local.take(whole), packed.flatten(dim, dim + 1))
        size = torch.Size(local.local_shape).numel()
        piece = -(-size // shards)
        for shard in range(shards):
            layout = local.flattened(min(shard * piece, size), min((shard + 1) * piece, size))
            layout.put(layout.take(whole), rebuilt)
            held += layout.num_elements()
    assert torch.equal(rebuilt, whole)
    assert held == whole.numel()
