"""Tensors overlap exactly where they share a byte of one storage."""

import pytest
import torch
from torch import Tensor

from tests.sanitizer.memory_ranges import MemoryRange

TABLE = torch.zeros(4, 6)


@pytest.mark.parametrize(
    ("x", "y", "expected"),
    [
        (TABLE[:2], TABLE[2:], False),
        (TABLE[:3], TABLE[2:], True),
        (TABLE[:, :3], TABLE[:, 3:], False),
        (TABLE[:, :4], TABLE[:, 3:], True),
        (TABLE[::2], TABLE[1::2], False),
        (TABLE[1], TABLE[:, 5], True),
        (TABLE.t(), TABLE[3, 5], True),
        (TABLE[:1, :1].expand(4, 6), TABLE[0, 1:], False),
        (TABLE, TABLE.clone(), False),
        (TABLE, TABLE[:0], False),
        (TABLE.view(torch.uint8)[0, :4], TABLE[0, 0], True),
        (TABLE.view(torch.uint8)[0, 4:], TABLE[:, 0], False),
    ],
)
def test_tensors_overlap_where_they_share_a_byte(x: Tensor, y: Tensor, expected: bool) -> None:
    assert MemoryRange.of(x).overlaps(MemoryRange.of(y)) is expected
    assert MemoryRange.of(y).overlaps(MemoryRange.of(x)) is expected


def test_a_range_keeps_nothing_alive_and_tells_when_its_storage_is_freed() -> None:
    freed: list[object] = []
    x = torch.zeros(3)
    view = MemoryRange.of(x[1:], freed.append)
    assert (view.start, view.stop, view.shape) == (4, 12, (2,))
    x = x.view(1, 3)
    assert not freed
    del x
    assert freed == [view.death]
