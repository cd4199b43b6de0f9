"""Attention kernels of a verification on GPUs, whose dtypes are not the plan's."""

from __future__ import annotations

import torch

from workbench.plan.model.attention_kernel import attention_kernels
from workbench.plan.resolved_plan import ResolvedPlan


def attention_of_ranks(plan: ResolvedPlan, precision: str) -> str:
    """The plan's kernel where its GPU has it for the verification's dtype, else the best that does.

    Args:
        plan: The plan as it is run.
        precision: Of the verification; in fp8 all but the GEMMs is fp32.
    """
    s, head_dim = plan.strategy, int(plan.shape.head_dim or 0)
    dtype, stored = ("fp32", "fp8") if precision == "fp8" else (precision, precision)
    # The verified plan must be legal too, whose precision is fp8.
    legal = attention_kernels(plan.gpu, stored, head_dim)
    kernels = [each for each in attention_kernels(plan.gpu, dtype, head_dim) if each in legal]
    return s.attention if s.attention in kernels else kernels[0]


def attention_of_reference(plan: ResolvedPlan, dtype: torch.dtype, device: torch.device) -> str:
    """The kernel of the one device: CPUs have one, and no fused CUDA kernel takes fp64.

    Args:
        plan: The plan as it is verified.
        dtype: Of the one device's activations.
        device: The one device.
    """
    if device.type == "cpu":
        return "flash"
    return "math" if dtype == torch.float64 else plan.strategy.attention
