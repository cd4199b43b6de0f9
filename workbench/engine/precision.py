"""What a plan's precision means for tensors. There is no autocast."""

from __future__ import annotations

import torch

from workbench.plan.schema import Plan

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def dtypes(plan: Plan) -> tuple[torch.dtype, torch.dtype]:
    """(parameters and activations, accumulated gradients) of a complete plan."""
    return DTYPES[plan.strategy.precision], DTYPES[plan.strategy.gradient_dtype]
