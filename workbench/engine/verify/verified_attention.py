"""Attention kernels of a verification on GPUs, whose dtypes are not the plan's."""

from __future__ import annotations

import torch

from workbench.plan.model.attention_kernel import kernels_of_shape
from workbench.plan.resolved_plan import ResolvedPlan


def attention_of_ranks(plan: ResolvedPlan, precision: str) -> str:
    """The plan's kernel where its GPU has it for the verification's dtype, else the best that does.

    Args:
        plan: The plan as it is run.
        precision: Of the verification; in fp8 all but the GEMMs is fp32.
    """
    s, length = plan.strategy, plan.training.sequence_length
    dtype, stored = ("fp32", "fp8") if precision == "fp8" else (precision, precision)
    # The verified plan must be legal too, whose precision is fp8.
    documents = plan.corpus.separate_documents
    legal = kernels_of_shape(plan.gpu, stored, plan.shape, length, documents)
    runs = kernels_of_shape(plan.gpu, dtype, plan.shape, length, documents)
    kernels = [each for each in runs if each in legal]
    return s.attention if s.attention in kernels else kernels[0]


def attention_of_reference(plan: ResolvedPlan, dtype: torch.dtype, device: torch.device) -> str:
    """The kernel of the one device: CPUs have one, and no fused CUDA kernel takes fp64. Where
    scores have a window, biases or a soft-cap it keeps them all, as no rank need do.

    Args:
        plan: The plan as it is verified.
        dtype: Of the one device's activations.
        device: The one device.
    """
    length, documents = plan.training.sequence_length, plan.corpus.separate_documents
    if not plan.code and (documents or plan.shape.changes_scores(length)):
        return "math"
    if device.type == "cpu":
        return "flash"
    return "math" if dtype == torch.float64 else plan.strategy.attention
