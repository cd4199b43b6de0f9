"""The small plans that a calibration measures whole steps of."""

from __future__ import annotations

from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.schema import build_plan

TINY = {"hidden": 16, "heads": 2, "ffn": 32, "vocab": 256}
"""A model whose steps take what the host takes."""
TINY_SEQUENCE = 4


def probe_plan(
    device: str,
    sequence: int,
    microbatches: int,
    recompute: str = "none",
    kernels: str = "eager",
    **shape: int,
) -> ResolvedPlan:
    """The complete plan of a probe, one rank; figures of its GPU mean nothing. `shape` as in a
    plan's `model`.
    """
    figures = dict.fromkeys(("memory_gib", "bandwidth_gbs", "link_gbs", "pcie_gbs"), 1.0)
    gpu = {"name": "any", "device": device, "tflops": {"fp32": 1.0}, **figures}
    training = {"sequence_length": sequence, "global_batch": microbatches, "micro_batch": 1}
    written = {
        "model": shape,
        "cluster": {"gpu": gpu, "gpus": 1},
        "strategy": {"precision": "fp32", "recompute": recompute, "kernels": kernels},
    }
    return build_plan({**written, "training": training}).resolve()
