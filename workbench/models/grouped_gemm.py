"""Grouped GEMM: rows sorted by group, each group's rows times the group's own weight (MoE
experts).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from workbench.planned_device import on_gpu

ALIGNED_BYTES = 16
"""torch's grouped GEMM reads rows of weights and inputs at multiples of so many bytes."""
KERNEL_SINCE = {9: "2.11", 10: "2.13"}
"""Compute capability (major) -> the first torch of ours whose kernel is known to run there."""


class RowGroups:
    """How many rows each group has: on the device, and on the host once somebody asks.

    Args:
        counts_E: Rows of each group [E], on the device.
        read: Reads them, which waits for the device.
    """

    def __init__(self, counts_E: Tensor, read: Callable[[], Sequence[int]]) -> None:
        self._counts_E, self._read = counts_E, read

    @cached_property
    def ends_E(self) -> Tensor:
        """End of each group among the rows, int32 [E]."""
        return self._counts_E.cumsum(0, dtype=torch.int32)

    @property
    def empty_E(self) -> Tensor:
        """Whether a group has no rows, [E]."""
        return self._counts_E == 0

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Rows of each group, on the host."""
        return tuple(self._read())

    def slices(self) -> Iterator[tuple[int, slice]]:
        """(group, its rows) for every group that has rows."""
        start = 0
        for group, count in enumerate(self.counts):
            if count:
                yield group, slice(start, start + count)
            start += count


class GroupedLinear(nn.Module):
    """One linear layer for each group; weights stacked [groups, out, in], biases [groups, out]."""

    def __init__(self, groups: int, inputs: int, outputs: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(groups, outputs, inputs))
        self.bias = nn.Parameter(torch.empty(groups, outputs)) if bias else None
        self.bias_share = 1.0
        """The share of the bias that is added here, where several ranks' results are summed."""
        self.add_adapter: Callable[[Tensor, Tensor, RowGroups], Tensor] | None = None
        """Adds to the output [R, out] what adapters make of the rows [R, in]."""

    def forward(self, x_RI: Tensor, groups: RowGroups) -> Tensor:
        """Rows [R, in], those of group 0 first and so on, to [R, out]."""
        bias = (
            self.bias if self.bias is None or self.bias_share == 1 else self.bias * self.bias_share
        )
        y_RO = grouped_linear(x_RI, self.weight, bias, groups)
        return y_RO if self.add_adapter is None else self.add_adapter(y_RO, x_RI, groups)


def grouped_linear(x_RI: Tensor, weight: Tensor, bias: Tensor | None, groups: RowGroups) -> Tensor:
    """Rows [R, in], each times its group's weight [out, in] of [groups, out, in], to [R, out]."""
    output: Tensor
    if bias is None and has_grouped_kernel(x_RI, weight):
        output = _GroupedKernel.apply(x_RI, weight, groups)
    else:
        output = _GemmPerGroup.apply(x_RI, weight, bias, groups)
    return output


def has_grouped_kernel(x_RI: Tensor, weight: Tensor) -> bool:
    """Whether one kernel multiplies all groups: on GPUs in bf16, where rows are aligned and torch
    has the kernel. A rehearsal takes it to be there; the other way allocates the same.
    """
    aligned = all(x * weight.element_size() % ALIGNED_BYTES == 0 for x in weight.shape[1:])
    if not (on_gpu(x_RI) and x_RI.dtype == torch.bfloat16 and aligned):
        return False
    return not x_RI.is_cuda or torch_has_kernel(torch.cuda.get_device_capability(x_RI.device)[0])


def torch_has_kernel(major: int, version: str = torch.__version__) -> bool:
    """Whether torch's grouped GEMM is one kernel on GPUs of this compute capability; on others it
    loops over the groups, and waits for their sizes first (`GroupedBlas.cpp`).
    """
    return major in KERNEL_SINCE and TorchVersion(version) >= KERNEL_SINCE[major]


class _GroupedKernel(torch.autograd.Function):
    """One GEMM of all groups, whose rows the device counts: the host waits for nothing."""

    @staticmethod
    def forward(ctx: Any, x_RI: Tensor, weight: Tensor, groups: RowGroups) -> Tensor:
        # A frozen weight has no gradient, which alone needs the input.
        ctx.save_for_backward(x_RI if ctx.needs_input_grad[1] else None, weight)
        ctx.groups = groups
        return F.grouped_mm(x_RI, weight.transpose(1, 2), offs=groups.ends_E)

    @staticmethod
    def backward(ctx: Any, gradient_RO: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x_RI, weight = ctx.saved_tensors
        gradient_RO, ends_E = gradient_RO.contiguous(), ctx.groups.ends_E
        x_gradient = F.grouped_mm(gradient_RO, weight, offs=ends_E)
        if x_RI is None:
            return x_gradient, None, None
        weight_gradient = F.grouped_mm(gradient_RO.T, x_RI, offs=ends_E)
        # A product over no rows: zero, whatever the kernel leaves there.
        weight_gradient.masked_fill_(ctx.groups.empty_E[:, None, None], 0)
        return x_gradient, weight_gradient, None


class _GemmPerGroup(torch.autograd.Function):
    """One GEMM for each group, written straight into one output.

    Autograd on split, matmul and concatenate would hold a list of chunks beside it, in forward and
    in backward.
    """

    @staticmethod
    def forward(
        ctx: Any, x_RI: Tensor, weight: Tensor, bias: Tensor | None, groups: RowGroups
    ) -> Tensor:
        ctx.save_for_backward(x_RI if ctx.needs_input_grad[1] else None, weight)
        ctx.groups, ctx.has_bias = groups, ctx.needs_input_grad[2]
        y_RO = x_RI.new_empty(len(x_RI), weight.shape[1])
        for group, rows in groups.slices():
            if bias is None:
                torch.mm(x_RI[rows], weight[group].T, out=y_RO[rows])
            else:
                torch.addmm(bias[group], x_RI[rows], weight[group].T, out=y_RO[rows])
        return y_RO

    @staticmethod
    def backward(
        ctx: Any, gradient_RO: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x_RI, weight = ctx.saved_tensors
        x_gradient = gradient_RO.new_empty(len(gradient_RO), weight.shape[2])
        weight_gradient = None if x_RI is None else torch.zeros_like(weight)
        bias_gradient = weight.new_zeros(weight.shape[:2]) if ctx.has_bias else None
        for group, rows in ctx.groups.slices():
            torch.mm(gradient_RO[rows], weight[group], out=x_gradient[rows])
            if weight_gradient is not None:
                torch.mm(gradient_RO[rows].T, x_RI[rows], out=weight_gradient[group])
            if bias_gradient is not None:
                bias_gradient[group] = gradient_RO[rows].sum(0)
        return x_gradient, weight_gradient, bias_gradient, None
