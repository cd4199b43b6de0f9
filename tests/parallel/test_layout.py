"""Layouts: slices cover a tensor once, and taking and putting are inverse."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from workbench.parallel.layout import Layout
from workbench.parallel.mesh import Mesh, MeshAxis


def axis(name: str, size: int, index: int) -> MeshAxis:
    return MeshAxis(name, size, index, tuple(range(size)), None)


@given(rows=st.integers(1, 40), columns=st.integers(1, 5), size=st.integers(1, 8), dim=st.integers(0, 1))
def test_slices_of_all_ranks_make_the_tensor(rows: int, columns: int, size: int, dim: int) -> None:
    whole = torch.arange(rows * columns, dtype=torch.float64).view(rows, columns) + 1
    rebuilt = torch.zeros_like(whole)
    sizes = set()
    for index in range(size):
        layout = Layout.whole("w", (rows, columns)).split(dim, axis("tensor", size, index))
        local = layout.take(whole)
        assert local.shape == layout.local_shape
        assert local.sum() == layout.valid(local).sum(), "padding must be zero"
        sizes.add(layout.local_shape)
        layout.put(local, rebuilt)
    assert torch.equal(rebuilt, whole)
    assert len(sizes) == 1, "every rank holds the same size"


@given(st.integers(1, 4), st.integers(1, 4), st.booleans(), st.booleans())
def test_every_entry_is_owned_once(tensor: int, data: int, split: bool, replica: bool) -> None:
    owned = 0
    for t in range(tensor):
        for d in range(data):
            axes = {"tensor": axis("tensor", tensor, t), "data": axis("data", data, d)}
            layout = Layout.whole("w", (12, 3), replica=replica)
            layout = layout.split(0, axes["tensor"]) if split else layout
            if layout.owned(Mesh(0, tensor * data, axes)):
                owned += layout.valid(layout.take(torch.ones(12, 3))).numel()
    assert owned == (0 if replica else 36)
