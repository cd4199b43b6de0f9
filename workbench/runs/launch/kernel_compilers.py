"""Compilers of a plan's kernels: Triton on a GPU, a C++ compiler on a CPU; torchao for fp8."""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec

from workbench.errors import Problem
from workbench.plan.schema import Quantize


def compiler() -> str | None:
    """Path of the C++ compiler that torch.compile takes, the one that CXX names or g++; None where
    it is missing.
    """
    return shutil.which(os.environ.get("CXX") or "g++")


def missing_compiler(kernels: str, device: str) -> list[Problem]:
    """Why `kernels` (eager, compiled, fused) cannot be compiled for `device` here; empty if they
    can.
    """
    if kernels == "eager" or (find_spec("triton") if device == "cuda" else compiler()):
        return []
    named = os.environ.get("CXX")
    needed = (
        f"the C++ compiler '{named}' that CXX names"
        if named
        else "a C++ compiler, g++ or one that CXX names"
    )
    needed = "Triton (`pip install triton`)" if device == "cuda" else needed
    return [
        Problem(
            "strategy.kernels",
            f"is '{kernels}', which needs {needed}; it is not here; legal: 'eager'",
        )
    ]


def missing_four_bit_kernel(quantize: Quantize | None, kernels: str, device: str) -> list[Problem]:
    """Why no kernel here dequantizes a 4-bit base; empty if one does, or plain operators do."""
    if quantize is None or kernels == "eager" or device != "cuda" or find_spec("triton"):
        return []
    needed = "whose kernel on GPUs needs Triton (`pip install triton`)"
    return [
        Problem(
            "finetune.quantize",
            f"is {quantize.format}, {needed}; it is not here; legal: null, or strategy.kernels: "
            "eager",
        )
    ]


def missing_torchao(precision: str) -> list[Problem]:
    """Why GEMMs cannot run in `precision` here; empty if they can."""
    if precision != "fp8" or find_spec("torchao"):
        return []
    needed = "torchao (`pip install torchao`)"
    return [
        Problem(
            "strategy.precision", f"is 'fp8', which needs {needed}; it is not here; legal: 'bf16'"
        )
    ]
