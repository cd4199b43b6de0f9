"""Bytes per parameter of what training keeps: weight, gradient, moments, fp32 master weight.

ZeRO's bookkeeping (arXiv:1910.02054, section 3.1) with the dtypes that a plan names:
mixed-precision AdamW keeps 2 + 4 + 8 + 4 bytes where gradients add up in fp32. Nothing here is
sharded yet.
"""

from __future__ import annotations

from dataclasses import dataclass

from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.schema import Optimizer

DTYPE_BYTES = {
    "fp32": 4,
    "tf32": 4,
    "bf16": 2,
    "fp16": 2,
    "fp8": 2,
    "mxfp8": 2,
    "nvfp4": 2,
    "int8": 1,
}
"""Bytes of a stored element, by dtype or by the precision of GEMMs; under fp8 parameters and
activations stay in 16 bits.
"""
MASTER_BYTES = 4


@dataclass(frozen=True)
class StateBytes:
    """Bytes per parameter, unsharded."""

    parameter: int
    gradient: int
    moments: int
    master: int
    """0 where the optimizer steps the parameter itself."""

    @property
    def optimizer(self) -> int:
        """Moments and master weight: what ZeRO-1 shards."""
        return self.moments + self.master


def state_bytes(plan: ResolvedPlan) -> StateBytes:
    """Bytes per parameter of a plan's own engine; a framework profile may keep other dtypes."""
    optimizer, precision = plan.training.optimizer, plan.strategy.precision
    return StateBytes(
        DTYPE_BYTES[precision],
        DTYPE_BYTES[plan.strategy.gradient_dtype],
        moment_bytes(optimizer),
        master_bytes(optimizer, precision),
    )


def num_moments(optimizer: Optimizer) -> int:
    """Moments per parameter: AdamW's two, SGD's momentum, none without momentum."""
    return 2 if optimizer.name == "adamw" else int(optimizer.beta1 > 0)


def moment_bytes(optimizer: Optimizer) -> int:
    """Bytes of moments per parameter."""
    return num_moments(optimizer) * DTYPE_BYTES[optimizer.moments]


def master_bytes(optimizer: Optimizer, precision: str) -> int:
    """Bytes of the fp32 master weight per parameter: of 16-bit parameters, unless the plan has
    none.
    """
    return MASTER_BYTES if has_master(optimizer, DTYPE_BYTES[precision]) else 0


def has_master(optimizer: Optimizer, parameter_bytes: float) -> bool:
    """Whether parameters of so many bytes have fp32 master weights."""
    return parameter_bytes < 4 and optimizer.master == "auto"
