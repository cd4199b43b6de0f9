"""Mixture of experts (MoE): router, dispatch to routed experts, combine, and shared experts.

Shapes as in `moe_routing`: N tokens = B sequences x T, E experts, k choices a token, R rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from workbench.models.grouped_gemm import GroupedLinear, RowGroups
from workbench.models.host_counts import CountReader, kept_for_recomputation, start_reading
from workbench.models.moe_routing import ExpertRows, Router, Routing, capacity_rows, dropless_rows
from workbench.models.seams import Activate
from workbench.plan.model.model_shape import Moe, Shape


class GroupedExperts(nn.Module):
    """All routed experts of a layer: each projection's weights stacked, [experts, out, in]."""

    def __init__(self, shape: Shape, moe: Moe) -> None:
        super().__init__()
        bias = shape.biases == "all"
        gated = shape.gated
        self.gate = GroupedLinear(moe.experts, shape.hidden, moe.ffn, bias) if gated else None
        self.up = GroupedLinear(moe.experts, shape.hidden, moe.ffn, bias)
        self.down = GroupedLinear(moe.experts, moe.ffn, shape.hidden, bias)
        self.activate = Activate(shape.mlp)

    def forward(self, x_RD: Tensor, groups: RowGroups) -> Tensor:
        """Rows [R, D], sorted by expert, to the experts' outputs [R, D]."""
        up = self.up(x_RD, groups)
        activated = (
            self.activate(up, None)
            if self.gate is None
            else self.activate(self.gate(x_RD, groups), up)
        )
        output: Tensor = self.down(activated, groups)
        return output


ExpertRun = Callable[[Tensor], Tensor]
"""Rows [R, D], sorted by expert, to the outputs of their experts, in the same order."""


class TokenDispatcher(nn.Module):
    """The dispatcher seam: brings rows to the ranks that hold their experts; here, to this
    device.
    """

    def __init__(self, read_counts: CountReader = start_reading) -> None:
        super().__init__()
        self.read_counts = read_counts

    def forward(self, num_rows: int, counts_E: Tensor | None, experts: GroupedExperts) -> ExpertRun:
        """Start to learn how many rows each expert gets, which the rows are gathered behind.

        Args:
            num_rows: Rows of all experts, R.
            counts_E: Rows of each expert [E]; None if all have the same number.
            experts: The experts of this rank.
        """
        num_experts = len(experts.up.weight)
        if counts_E is None:
            groups = equal_groups(num_rows, num_experts, experts.up.weight.device)
        else:
            groups = kept_for_recomputation(
                lambda: RowGroups(counts_E, self.read_counts(counts_E, num_rows))
            )
        return lambda x_RD: experts(x_RD, groups)


def equal_groups(total: int, num_groups: int, device: torch.device) -> RowGroups:
    """Groups of the same number of rows."""
    counts = [total // num_groups] * num_groups
    return RowGroups(torch.full((num_groups,), counts[0], device=device), lambda: counts)


class MoE(nn.Module):
    """MoE feed-forward layer: router, dispatch to routed experts, combine, shared experts.

    Args:
        shape: Of the model; `shape.moe` is set.
        shared: The shared experts, applied to all tokens, as one dense layer; or None.
    """

    def __init__(self, shape: Shape, shared: nn.Module | None) -> None:
        super().__init__()
        assert shape.moe is not None
        self.moe = shape.moe
        self.route = Router(shape.hidden, shape.moe)
        self.experts = GroupedExperts(shape, shape.moe)
        self.shared = shared
        self.dispatcher = TokenDispatcher()

    def forward(self, x_BTD: Tensor) -> tuple[Tensor, Tensor | None]:
        """Route tokens to experts and combine the experts' outputs.

        Args:
            x_BTD: Normed hidden states [B, T, D].

        Returns:
            The feed-forward branch [B, T, D], and the aux loss, a scalar: None in evaluation or if
            its coefficient is 0.
        """
        routing = self.route(x_BTD)
        rows, gates_NK = self.rows(routing)
        run_experts = self.dispatcher(len(rows.tokens_R), rows.counts_E, self.experts)
        dispatched_RD = _Dispatch.apply(x_BTD.flatten(0, 1), rows)
        expert_out_RD = run_experts(dispatched_RD)
        y_BTD = _Combine.apply(expert_out_RD, gates_NK, rows.rows_NK).view_as(x_BTD)
        return y_BTD if self.shared is None else y_BTD + self.shared(x_BTD), routing.aux_loss

    def rows(self, routing: Routing) -> tuple[ExpertRows, Tensor]:
        """The row of each choice, and the gates [N, k], 0 for choices that are dropped."""
        gates_NK = routing.gates_BTK.flatten(0, 1)
        if self.moe.capacity is None:
            return dropless_rows(routing.experts_BTK, self.moe.experts), gates_NK
        rows = capacity_rows(routing.experts_BTK, self.moe)
        assert rows.kept_NK is not None
        return rows, gates_NK * rows.kept_NK


class _Dispatch(torch.autograd.Function):
    """Copies of tokens in the order of experts.

    Backward adds the gradients of a token's choices in their order; `index_add_` on a GPU would add
    them in any order, and the sum would differ from run to run.
    """

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, rows: ExpertRows) -> Tensor:
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
    """The experts' outputs of each token, weighted by its gates and added in choice order."""

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
        y_gradient, gates_gradient = torch.zeros_like(y_RD), torch.empty_like(gates_NK)
        for choice in range(rows_NK.shape[1]):
            row = rows_NK[:, choice]
            gates_gradient[:, choice] = (y_RD.index_select(0, row) * gradient_ND).sum(-1)
            # Only dropped choices share a row with another, and their gate is 0: each entry has at
            # most one nonzero term, so the order in which `index_add_` adds does not matter.
            y_gradient.index_add_(0, row, gradient_ND * gates_NK[:, choice, None])
        return y_gradient, gates_gradient, None
