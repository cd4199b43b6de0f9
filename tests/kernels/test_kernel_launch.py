"""Launches that find compiled code again, with a kernel that only writes down how it is called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from workbench.kernels.backends import kernel_launch
from workbench.kernels.backends.kernel_launch import launch

X, Y = torch.zeros(8, 64), torch.zeros(8, 64)


class Kernel:
    """As Triton's: indexed by a grid it launches, and returns what it compiled."""

    arg_names = ("X", "BIAS", "Y", "rows", "scale", "WIDE", "BLOCK")

    def __init__(self) -> None:
        self.bound: list[Any] = []
        self.direct: list[Any] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def bind(*arguments: Any, **constants: Any) -> Kernel.Code:
            self.bound.append((grid, arguments, constants))
            return Kernel.Code(self)

        return bind

    class Code:
        """Compiled code."""

        def __init__(self, kernel: Kernel) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
            return lambda *arguments: self.kernel.direct.append((grid, arguments))


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    monkeypatch.setattr(kernel_launch, "_compiled", {})
    monkeypatch.setattr(kernel_launch, "INTERPRETED", False)
    return Kernel()


def call(kernel: Kernel, *tensors: Any, programs: int = 4, rows: int = 8, block: int = 64) -> None:
    launch(kernel, programs, tensors, (rows, 0.5), WIDE="fp32", BLOCK=block, num_warps=4)


def test_the_second_launch_takes_pointers_and_a_value_for_each_constant(kernel: Kernel) -> None:
    call(kernel, X, None, Y)
    call(kernel, Y, None, X, programs=3)
    assert [(grid, constants["num_warps"]) for grid, _, constants in kernel.bound] == [((4,), 4)]
    pointers = Y.data_ptr(), None, X.data_ptr()
    assert kernel.direct == [((3, 1, 1), (*pointers, 8, 0.5, None, None))]


@pytest.mark.parametrize(
    "other",
    [
        lambda kernel: call(kernel, X.double(), None, Y),
        lambda kernel: call(kernel, X, Y, Y),
        lambda kernel: call(kernel, X, None, Y, rows=1),
        lambda kernel: call(kernel, X, None, Y, block=128),
        lambda kernel: call(kernel, X.flatten()[1:], None, Y),
        lambda kernel: call(Kernel(), X, None, Y),
    ],
    ids=["dtype", "a tensor more", "number", "constant", "alignment", "kernel"],
)
def test_code_for_other_arguments_is_not_used(
    kernel: Kernel, other: Callable[[Kernel], None]
) -> None:
    call(kernel, X, None, Y)
    other(kernel)
    assert not kernel.direct


def test_launches_of_unaligned_tensors_are_not_remembered(kernel: Kernel) -> None:
    for _ in range(2):
        call(kernel, X.flatten()[1:], None, Y)
    assert len(kernel.bound) == 2 and not kernel.direct


def test_many_shapes_do_not_grow_memory(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_launch, "MAX_COMPILED", 3)
    for rows in range(10):
        call(kernel, X, None, Y, rows=rows)
    assert 0 < len(kernel_launch._compiled) <= 3
