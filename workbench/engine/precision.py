"""Dtypes and torch settings of a plan's numbers. There is no autocast."""

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


def plan_dtypes(plan: Plan) -> tuple[torch.dtype, torch.dtype]:
    """(dtype of parameters and activations, dtype of accumulated gradients)."""
    precision = plan.strategy.precision
    return DTYPES[STORED.get(precision, precision)], DTYPES[plan.strategy.gradient_dtype]


def set_matmul_precision(plan: Plan) -> None:
    """Allow TF32 GEMMs where the plan's precision is tf32, and only there.

    The setting is the process's: the worker calls this once. It has no effect on CPU.
    """
    torch.set_float32_matmul_precision("high" if plan.strategy.precision == "tf32" else "highest")


def set_determinism(plan: ResolvedPlan) -> None:
    """Let torch take kernels that add in the same order every time, where the plan needs them.

    Without, flash attention's backward and embeddings' gradients on GPUs are added by atomics. An
    operator that has no such kernel raises, naming itself. cuBLAS needs its workspace fixed too:
    the launch sets CUBLAS_WORKSPACE_CONFIG. The setting is the process's: the worker calls this
    once.
    """
    torch.use_deterministic_algorithms(plan.deterministic_kernels)
    # Only what is read uninitialized would differ, and nothing is.
    setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010
