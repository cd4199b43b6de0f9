"""What a plan's precision means for tensors, and for what torch may choose to compute with. There
is no autocast.
"""

from __future__ import annotations

import torch

from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.schema import STORED, Plan

DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


def dtypes(plan: Plan) -> tuple[torch.dtype, torch.dtype]:
    """(parameters and activations, accumulated gradients) of a complete plan."""
    precision = plan.strategy.precision
    return DTYPES[STORED.get(precision, precision)], DTYPES[plan.strategy.gradient_dtype]


def set_products(plan: Plan) -> None:
    """Let matrix products of fp32 tensors round their inputs to tf32 where the plan says so, and
    nowhere else.

    It holds for the whole process, so that the worker calls it, once. Only CUDA cards have such
    products.
    """
    torch.set_float32_matmul_precision("high" if plan.strategy.precision == "tf32" else "highest")


def set_attention(plan: ResolvedPlan) -> None:
    """On GPUs, let attention run by fused operators alone: where none fits, an error, not [B, H, T,
    T] in memory.

    It holds for the whole process, so that the worker calls it, once. A model that is code chooses
    for itself.
    """
    if plan.gpu.device == "cuda" and plan.code is None:
        torch.backends.cuda.enable_math_sdp(False)
