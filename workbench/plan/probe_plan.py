"""The small plans that a calibration measures whole steps of."""

from __future__ import annotations

from typing import Literal

from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.schema import build_plan

TINY = {"hidden": 16, "heads": 2, "ffn": 32, "vocab": 256}
"""A model whose steps take what the host takes."""
TINY_SEQUENCE = 4
TINY_PRECISION: dict[str, Literal["fp32", "bf16"]] = {"cuda": "bf16"}
"""Device -> precision of its steps, in which its models mostly train; fp32 elsewhere. With master
weights and gradients in fp32 the host has more to do.
"""


def probe_plan(
    device: str,
    sequence: int,
    microbatches: int,
    recompute: str = "none",
    kernels: str = "eager",
    precision: str = "fp32",
    **shape: int,
) -> ResolvedPlan:
    """The complete plan of a probe, one rank; figures of its GPU mean nothing. `shape` as in a
    plan's `model`.
    """
    figures = dict.fromkeys(("memory_gib", "bandwidth_gbs", "link_gbs", "pcie_gbs"), 1.0)
    speeds = dict.fromkeys(("fp32", precision), 1.0)
    gpu = {"name": "any", "device": device, "tflops": speeds, **figures}
    training = {"sequence_length": sequence, "global_batch": microbatches, "micro_batch": 1}
    written = {
        "model": shape,
        "cluster": {"gpu": gpu, "gpus": 1},
        "strategy": {"precision": precision, "recompute": recompute, "kernels": kernels},
    }
    return build_plan({**written, "training": training}).resolve()
