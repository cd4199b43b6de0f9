"""Several ranks that train a small plan and are compared with one device."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from tests.gpu.checks import Evidence
from workbench.engine.verify import equivalence
from workbench.engine.verify.equivalence import TOLERANCE, verify
from workbench.engine.verify.forked_ranks import run_ranks
from workbench.engine.verify.single_device import ReferenceRun
from workbench.engine.verify.tensor_difference import DifferenceScale
from workbench.machine import gpu_catalog
from workbench.machine.attached import attached, is_another_model
from workbench.plan.schema import Plan

GPU_TOLERANCE = 1e-4
"""fp32 on a GPU against fp32 on a CPU: ten times what two orders of CPU ranks may differ by."""
ANY_GPU = "h100-sxm-80gb"
"""For a GPU that the catalog does not know: what the plan names decides no kernel's numbers."""
SECONDS = 100.0


def gpu_name(evidence: Evidence) -> str:
    """What `cluster.gpu` says: the attached GPU's name in the catalog, which unlike `local` may
    have more ranks than are attached; `local` in a dry run.
    """
    if evidence.dry:
        return "local"
    found = attached().name
    known = (
        name
        for name, entry in gpu_catalog.gpus().items()
        if entry.driver_names and not is_another_model(entry.gpu, found)
    )
    return next(known, ANY_GPU)


def on_cpu(rank: int) -> torch.device:
    """Every rank on the CPU."""
    return torch.device("cpu")


def on_one_gpu(rank: int) -> torch.device:
    """Every rank on the first GPU."""
    return torch.device("cuda", 0)


def on_own_gpu(rank: int) -> torch.device:
    """A GPU a rank."""
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)


def compared(plan: Plan, evidence: Evidence, backend: str = "staged") -> dict[str, Any]:
    """`verify`'s answer for `plan` on `backend`: fp64 on CPU tensors, fp32 on GPUs."""
    device_of = on_cpu if evidence.dry else on_own_gpu if backend == "nccl" else on_one_gpu
    with patch.object(equivalence, "reference_and_scale", _in_a_child):
        return verify(
            plan.replace(**{"cluster.gpu": gpu_name(evidence)}),
            "fp64" if evidence.dry else "fp32",
            SECONDS,
            backend="gloo" if evidence.dry and backend == "nccl" else backend,
            device_of=device_of,
        )


def _in_a_child(*arguments: Any) -> tuple[ReferenceRun, DifferenceScale]:
    """`reference_and_scale` in a process of its own: where there is a GPU, the first backward
    starts CUDA, which ranks forked afterwards could not use.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "reference.pt")
        scale = run_ranks(1, partial(_write_reference, path, arguments), SECONDS)[0]
        return ReferenceRun(**torch.load(path, weights_only=True)), scale


_reference_and_scale = equivalence.reference_and_scale


def _write_reference(path: Path, arguments: tuple[Any, ...], rank: int) -> DifferenceScale:
    reference, scale = _reference_and_scale(*arguments)
    torch.save(vars(reference), path)
    return scale


def tolerance(evidence: Evidence) -> float:
    """Of relative differences."""
    return TOLERANCE["fp64"] if evidence.dry else GPU_TOLERANCE


def expect_equal(plan: Plan, evidence: Evidence, backend: str = "staged") -> None:
    """Assert that losses, gradients and weights are one device's."""
    answer = compared(plan, evidence, backend)
    for kind, gap in answer["max_relative_diff"].items():
        evidence.expect(kind, gap <= tolerance(evidence), gap=gap, worst=str(answer["worst"]))
