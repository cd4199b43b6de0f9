"""What one call reads, writes and computes, from its arguments."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from workbench.costmodel.compute.operator_roofline import Operator
from workbench.planned_device import REHEARSED_GPU
from workbench.rehearsal.operators.operator_trace import OperatorTrace
from workbench.schedules import Action


class Silent:
    """An observer that does nothing."""

    def action(self, label: str, action: Action | None) -> AbstractContextManager[None]:
        return nullcontext()

    def moment(self, name: str) -> None:
        pass


def counted(run: Callable[[], Any]) -> list[Operator]:
    """Operators of a call, in no action of a schedule."""
    with OperatorTrace(Silent()) as trace:
        run()
    return [operator for operator, _ in trace.counts]


def half(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


SHAPES = (64, 128), (64, 256)
X, Y, LONG = half(4, 8), half(4, 8), torch.zeros(3, dtype=torch.long)


@pytest.mark.parametrize(
    ("run", "read", "written"),
    [
        (lambda: X + Y, 128, 64),
        (lambda: X.add_(Y), 128, 64),
        (lambda: X.copy_(Y), 64, 64),
        (lambda: X.zero_(), 0, 64),
        (lambda: X.float(), 64, 128),
        (lambda: X * half(8).expand(4, 8), 80, 64),  # an expanded row is read once
        (lambda: torch.cat((X, Y)), 128, 128),
        (lambda: half(1000, 8).index_select(0, LONG), 48 + 24, 48),  # three of its rows
    ],
)
def test_bytes_of_an_operator(run: Callable[[], Any], read: int, written: int) -> None:
    moved = [o for o in counted(run) if o.name not in ("zeros",)]
    assert [(o.kind, o.read, o.written) for o in moved] == [("memory", read, written)]


def test_a_tensor_that_holds_fp8_counts_as_the_operators_it_runs() -> None:
    """torchao's product of fp8 tensors is a product of 8 bits, a copy of each operand in the order
    that the kernel takes, and the inverses of both scales.
    """
    pytest.importorskip("torchao")
    from workbench.parallel.float8.float8_linear import Float8Gemms, Float8Layer, compute_scales

    gemms = Float8Gemms(Float8Layer("one", {"input": (), "weight": (), "gradient": ()}))
    device = REHEARSED_GPU
    with FakeTensorMode():
        x, g = (torch.empty(shape, dtype=torch.bfloat16, device=device) for shape in SHAPES)
        compute_scales([(gemms, "input", x), (gemms, "gradient", g)])
        found = counted(lambda: gemms.weight_gradient(g, x))
    by_name = {o.name: o for o in found}
    product, copies = by_name["_scaled_mm"], [o for o in found if o.name == "contiguous"]
    (n, d), (_, h) = SHAPES
    assert (product.kind, product.dtype, product.dims) == ("gemm", "fp8", (1, h, d, n))
    assert sorted((o.dtype, o.read, o.written) for o in copies) == [
        ("fp8", n * d, n * d),
        ("fp8", n * h, n * h),
    ]
    assert "mm" not in by_name


def test_views_move_nothing() -> None:
    assert not counted(lambda: X.view(8, 4).t().unsqueeze(0)[..., 1:].detach())
    assert not counted(lambda: torch.empty_like(X))


def test_dims_and_flops_of_a_gemm() -> None:
    (plain,) = counted(lambda: half(4, 16) @ half(16, 8))[-1:]
    assert (plain.kind, plain.dims, plain.flops) == ("gemm", (1, 4, 8, 16), 2 * 4 * 8 * 16)
    (batched,) = counted(lambda: torch.bmm(half(3, 4, 16), half(3, 16, 8)))[-1:]
    assert (batched.dims, batched.flops) == ((3, 4, 8, 16), 3 * plain.flops)
    (added,) = counted(lambda: torch.addmm(half(8), half(4, 16), half(16, 8)))[-1:]
    assert (added.dims, added.flops) == (plain.dims, plain.flops)


class Replaying:
    """Stands for an executor that replays the second microbatch seven times."""

    running: tuple[str, int, int] | None = None
    replays: ClassVar[Counter[tuple[str, int, int]]] = Counter({("F", 0, 1): 7, ("B", 0, 1): 7})


def test_replayed_microbatches_count_too() -> None:
    executor: Any = Replaying()
    trace = OperatorTrace(Silent(), executor)
    with trace:
        for microbatch in range(3):
            for kind, compute in (("F", torch.add), ("B", torch.mul)):
                executor.running = kind, 0, microbatch
                with trace.action(kind, Action(0, kind, microbatch)):
                    compute(X, Y)
        executor.running = None
        with trace.action("OPTIMIZER", None):
            X.zero_()
    found = {(o.name, o.phase): n for o, n in trace.of_step().items()}
    assert found == {("add", "forward"): 10, ("mul", "backward"): 10, ("zero_", "optimizer"): 1}
