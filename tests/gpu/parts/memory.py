"""Peak memory that the allocator measures, against rehearsal and estimate, on 1 and 2 ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from tests.gpu import staged_group  # noqa: F401  (registers the backend)
from tests.gpu.checks import Check, Evidence
from tests.gpu.ranks import gpu_name
from tests.rehearsal.measured import measure, total
from workbench.engine.session import Session
from workbench.engine.verify.forked_ranks import run_ranks
from workbench.parallel.mesh import build_mesh
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.schema import Plan
from workbench.planner import estimate
from workbench.rehearsal.rehearse import rehearse

TOLERANCE = 0.03
"""Of peak allocated bytes, for rehearsal and estimate alike."""
STEPS = 2
GEMM_WORKSPACES = 64 * 2**20
"""Bytes that cuBLAS keeps in torch's allocator, which a rehearsal leaves out."""
LLAMA_8B: dict[str, Any] = {
    "hidden": 4096,
    "heads": 32,
    "kv_heads": 8,
    "ffn": 14336,
    "vocab": 128256,
}

LORA: dict[str, Any] = {"finetune.lora": {"rank": 16, "alpha": 32.0}}
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "single": ("single", 1, {}),
    "zero-3 on 2": ("zero-3", 2, {}),
    "megatron-tp on 2": ("megatron-tp", 2, {}),
    "1f1b on 2": ("dapple", 2, {}),
}
LARGE: dict[str, dict[str, Any]] = {
    "llama-3-8b widths, 1 layer": {"layers": 1},
    "llama-3-8b widths, 4 layers": {"layers": 4},
    "llama-3-8b widths, 1 layer, recompute": {"layers": 1, "recompute": "full"},
    "llama-3-8b widths, 4 layers, lora": {"layers": 4, "finetune": LORA},
    "llama-3-8b widths, 4 layers, lora on nf4": {
        "layers": 4,
        "finetune": {**LORA, "finetune.quantize": {"format": "nf4"}},
    },
}


def small_plan(name: str, evidence: Evidence) -> Plan:
    """A tiny model of one strategy."""
    strategy, gpus, more = CASES[name]
    changes = {
        "strategy.precision": "bf16",
        "strategy.kernels": "eager" if evidence.dry else "fused",
        "strategy.data.bucket_mib": 1.0,
        "training.sequence_length": 64 if evidence.dry else 1024,
        "training.micro_batch": 2,
        "training.global_batch": 8,
    }
    gpu = gpu_name(evidence)
    return Plan.of("tiny", gpu=gpu, gpus=gpus, strategy=strategy, set=changes | more)


def large_plan(name: str, evidence: Evidence) -> Plan:
    """Layers of real widths, so that workspaces and the buffers of attention show."""
    more = dict(LARGE[name])
    changes = {
        "model": LLAMA_8B | {"layers": more.pop("layers")},
        "strategy.precision": "bf16",
        "strategy.kernels": "fused",
        "strategy.recompute": more.pop("recompute", "none"),
        "training.sequence_length": 8192,
        "training.micro_batch": 1,
        "training.global_batch": 2,
        **more.pop("finetune", {}),
    }
    return Plan.of("tiny", gpu=gpu_name(evidence), gpus=1, strategy="single", set=changes)


def peaks(plan: Plan, evidence: Evidence) -> list[dict[str, int]]:
    """By rank, what the allocator measures: `allocated`, and on a GPU `reserved`."""
    full = plan.resolve()
    if evidence.dry:
        measured = measure(full)
        return [{"allocated": total(rows, STEPS - 1, "peak")} for rows, _, _ in measured]
    return run_ranks(full.world_size, partial(_peaks_on_gpu, full), 100, "staged")


def _peaks_on_gpu(plan: ResolvedPlan, rank: int) -> dict[str, int]:
    device, t = torch.device("cuda", 0), plan.training
    session = Session.build(plan, build_mesh(plan, rank, device), device)
    shape = (plan.num_microbatches, t.micro_batch, t.sequence_length)
    tokens, targets = (torch.randint(plan.vocab, shape, device=device) for _ in range(2))
    for step in range(STEPS):
        torch.cuda.reset_peak_memory_stats()
        session.step(step, tokens, targets)
        torch.cuda.synchronize()
    free, everything = torch.cuda.mem_get_info()
    return {
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
        "in use on the GPU": everything - free,
    }


def compared(plan: Plan, evidence: Evidence) -> None:
    """Every rank's peak against rehearsal and estimate."""
    found = peaks(plan, evidence)
    evidence.measured("measured", found)
    for source, profile in (("rehearsed", rehearse(plan)), ("estimated", estimate(plan))):
        by_rank = profile.peak_allocated_by_rank
        said = [by_rank[profile.representative[rank]] for rank in range(len(found))]
        if source == "rehearsed" and not evidence.dry:  # no operator returns a workspace
            said = [size + GEMM_WORKSPACES for size in said]
        gaps = [said[rank] / found[rank]["allocated"] - 1 for rank in range(len(found))]
        within = all(abs(gap) <= TOLERANCE for gap in gaps)
        evidence.expect(f"{source} peak", within, gaps=gaps, bytes=said)


def small(name: str, evidence: Evidence) -> None:
    """Peaks of a tiny model."""
    compared(small_plan(name, evidence), evidence)


def large(name: str, evidence: Evidence) -> None:
    """Peaks at real widths."""
    names = ("rehearsed peak", "estimated peak")
    if evidence.on_gpu("a host has neither the memory nor the time for these widths", *names):
        compared(large_plan(name, evidence), evidence)


FORKS = True
CHECKS = [
    *(Check(name, partial(small, name), 120) for name in CASES),
    *(Check(name, partial(large, name), 90) for name in LARGE),
]
