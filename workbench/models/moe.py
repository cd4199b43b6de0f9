"""A mixture of experts in place of a feed-forward layer: a router, many small experts, some that
all tokens visit.

Shapes are those of `routing`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from workbench.models.grouped_gemm import Grouped
from workbench.models.moe_routing import Choice, Route, Rows, dropless, limited
from workbench.models.seams import Activate
from workbench.plan.model_shape import Moe, Shape

Counting = Callable[[Tensor, int], list[Any]]
"""Turns counts on the device, which add up to a total in their last dim, into integers of the host.

`counted` reads them and waits for the device; a rehearsal, which has no values, takes them as
`balanced`.
"""


def counted(counts: Tensor, total: int) -> list[Any]:
    """The counts as they are."""
    values: list[Any] = counts.tolist()
    return values


def balanced(counts: Tensor, total: int) -> list[Any]:
    """As even as whole numbers allow, whatever the counts are."""
    size = counts.shape[-1]
    row = [total // size + (i < total % size) for i in range(size)]
    return row if counts.dim() == 1 else [balanced(each, total) for each in counts.unbind()]


class Experts(nn.Module):
    """All routed experts of a layer: each projection's weights stacked, [experts, out, in]."""

    def __init__(self, shape: Shape, moe: Moe) -> None:
        super().__init__()
        bias = shape.biases == "all"
        self.gate = Grouped(moe.experts, shape.hidden, moe.ffn, bias) if shape.gated else None
        self.up = Grouped(moe.experts, shape.hidden, moe.ffn, bias)
        self.down = Grouped(moe.experts, moe.ffn, shape.hidden, bias)
        self.activate = Activate(shape.mlp)

    def forward(self, x_RD: Tensor, counts: Sequence[int]) -> Tensor:
        """Rows [R, D], sorted by expert, `counts` of each, to the experts' outputs [R, D]."""
        up = self.up(x_RD, counts)
        wide = (
            self.activate(up, None)
            if self.gate is None
            else self.activate(self.gate(x_RD, counts), up)
        )
        return self.down(wide, counts)


class Exchange(nn.Module):
    """`exchange(x, counts, experts)`: rows, sorted by expert, through whoever holds the experts;
    here: this device.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counting: Counting = counted

    def forward(self, x_RD: Tensor, counts_E: Tensor | None, experts: Experts) -> Tensor:
        """The experts' outputs [R, D], row by row."""
        return experts(x_RD, self.host(counts_E, len(x_RD), len(experts.up.weight)))

    def host(self, counts_E: Tensor | None, total: int, num_experts: int) -> list[int]:
        """Rows of each expert, known to the host."""
        return (
            [total // num_experts] * num_experts
            if counts_E is None
            else self.counting(counts_E, total)
        )


class Mixture(nn.Module):
    """The feed-forward layer as a mixture of experts; `shared` experts stand side by side in one
    dense layer.
    """

    def __init__(self, shape: Shape, shared: nn.Module | None) -> None:
        super().__init__()
        assert shape.moe is not None
        self.moe = shape.moe
        self.route = Route(shape.hidden, shape.moe)
        self.experts = Experts(shape, shape.moe)
        self.shared = shared
        self.exchange = Exchange()

    def forward(self, x_BTD: Tensor) -> tuple[Tensor, Tensor | None]:
        """(feed-forward branch [B, T, D], auxiliary loss or None)."""
        choice = self.route(x_BTD)
        rows, gates_NK = self.rows(choice)
        dispatched_RD = _Dispatch.apply(x_BTD.flatten(0, 1), rows)
        returned_RD = self.exchange(dispatched_RD, rows.counts_E, self.experts)
        y_BTD = _Combine.apply(returned_RD, gates_NK, rows.rows_NK).view_as(x_BTD)
        return y_BTD if self.shared is None else y_BTD + self.shared(x_BTD), choice.auxiliary

    def rows(self, choice: Choice) -> tuple[Rows, Tensor]:
        """Where each choice goes, and the gates [N, k] of those that are not dropped."""
        gates_NK = choice.gates_BTK.flatten(0, 1)
        if self.moe.capacity is None:
            return dropless(choice.experts_BTK, self.moe.experts), gates_NK
        rows = limited(choice.experts_BTK, self.moe)
        assert rows.kept_NK is not None
        return rows, gates_NK * rows.kept_NK


class _Dispatch(torch.autograd.Function):
    """Rows of tokens in the order of experts. Backward adds a token's choices in their order: the
    same every time.
    """

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, rows: Rows) -> Tensor:
        ctx.save_for_backward(rows.rows_NK, rows.kept_NK)
        return x_ND.index_select(0, rows.tokens_R)

    @staticmethod
    def backward(ctx: Any, gradient_RD: Tensor) -> tuple[Tensor, None]:
        rows_NK, kept_NK = ctx.saved_tensors
        total: Tensor | None = None
        for choice in range(rows_NK.shape[1]):
            own = gradient_RD.index_select(0, rows_NK[:, choice])
            if kept_NK is not None:
                own *= kept_NK[:, choice, None]
            total = own if total is None else total.add_(own)
        assert total is not None
        return total, None


class _Combine(torch.autograd.Function):
    """Each token's experts' outputs, weighted by its gates and added in the order of its
    choices.
    """

    @staticmethod
    def forward(ctx: Any, y_RD: Tensor, gates_NK: Tensor, rows_NK: Tensor) -> Tensor:
        ctx.save_for_backward(y_RD, gates_NK, rows_NK)
        total = y_RD.index_select(0, rows_NK[:, 0]).mul_(gates_NK[:, :1])
        for choice in range(1, rows_NK.shape[1]):
            total.addcmul_(y_RD.index_select(0, rows_NK[:, choice]), gates_NK[:, choice, None])
        return total

    @staticmethod
    def backward(ctx: Any, gradient_ND: Tensor) -> tuple[Tensor, Tensor, None]:
        y_RD, gates_NK, rows_NK = ctx.saved_tensors
        outgoing, gates = torch.zeros_like(y_RD), torch.empty_like(gates_NK)
        for choice in range(rows_NK.shape[1]):
            row = rows_NK[:, choice]
            gates[:, choice] = (y_RD.index_select(0, row) * gradient_ND).sum(-1)
            outgoing.index_add_(0, row, gradient_ND * gates_NK[:, choice, None])
        return outgoing, gates, None
