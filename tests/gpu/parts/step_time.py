"""Measured step time against the estimate, after calibrating this machine."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.gpu.checks import Check, Evidence
from workbench.engine.calibrate.measure import calibrate
from workbench.engine.calibrate.measured_sizes import CalibrationSurvey
from workbench.engine.session import Session
from workbench.engine.verify.forked_ranks import run_ranks
from workbench.machine.calibration_file import write_calibration
from workbench.parallel.mesh import build_mesh
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.schema import Plan
from workbench.planner import estimate
from workbench.runs.measure.calibrate import calibrate_file

TOLERANCE = 0.25
STEPS, SKIPPED = 10, 3
LLAMA_1B: dict[str, Any] = {
    "layers": 16,
    "hidden": 2048,
    "heads": 32,
    "kv_heads": 8,
    "ffn": 8192,
    "vocab": 32000,
}
CALIBRATE_SECONDS = 30.0
FEW_POINTS = CalibrationSurvey(
    gemm=((16, 16, 16), (256, 256, 256)),
    streams=(12 * 2**10, 12 * 2**20),
    attention=((1, 2, 64, 16),),
    messages=(256,),
    window=0.002,
)
NO_SPEED = "times of a shared CPU say nothing of a GPU's"


LORA: dict[str, Any] = {"finetune.lora": {"rank": 16, "alpha": 32.0}}
STEPS_OF: dict[str, tuple[str, dict[str, Any]]] = {
    "eager": ("eager", {}),
    "fused": ("fused", {}),
    "fused, lora": ("fused", LORA),
    "fused, lora on nf4": ("fused", {**LORA, "finetune.quantize": {"format": "nf4"}}),
}
"""Kind of a step -> (kernels, changes of the plan)."""


def plan_of(kind: str, evidence: Evidence, calibration: Path | None) -> Plan:
    """A dense model of about a billion parameters in bf16; tiny and in fp32 in a dry run."""
    kernels, more = STEPS_OF[kind]
    changes: dict[str, Any] = {
        **more,
        "strategy.precision": "fp32" if evidence.dry else "bf16",
        "strategy.kernels": "eager" if evidence.dry else kernels,
        "training.sequence_length": 64 if evidence.dry else 2048,
        "training.micro_batch": 2,
        "training.global_batch": 4,
    }
    if calibration is not None:
        changes["cluster.calibration"] = str(calibration)
    if not evidence.dry:
        changes["model"] = LLAMA_1B
    return Plan.of("tiny", gpu="local", gpus=1, strategy="single", set=changes)


def calibrated(evidence: Evidence) -> Path:
    """A calibration of this machine; a dry run's has few points, of one rank."""
    path = evidence.folder / "calibration.yaml"
    if evidence.dry:
        write_calibration(calibrate(1.0, survey=FEW_POINTS, worlds=(1,)), path)
    else:
        calibrate_file(path, CALIBRATE_SECONDS, [], None)
    return path


def step_seconds(plan: Plan, evidence: Evidence) -> float:
    """Median seconds of a step."""
    kind = "cpu" if evidence.dry else "cuda"
    seconds: list[float] = run_ranks(1, partial(_timed, plan.resolve(), kind), 120)[0]
    return sorted(seconds[SKIPPED:])[len(seconds[SKIPPED:]) // 2]


def _timed(plan: ResolvedPlan, kind: str, rank: int) -> list[float]:
    device, t = torch.device(kind), plan.training
    session = Session.build(plan, build_mesh(plan, rank, device), device)
    shape = (plan.num_microbatches, t.micro_batch, t.sequence_length)
    tokens, targets = (torch.randint(plan.vocab, shape, device=device) for _ in range(2))
    seconds = []
    for step in range(STEPS):
        began = time.perf_counter()
        float(session.step(step, tokens, targets).loss)  # waits for the device
        seconds.append(time.perf_counter() - began)
    return seconds


def estimated_and_measured(evidence: Evidence) -> None:
    """The calibrated estimate of a step, and the step."""
    path = calibrated(evidence)
    evidence.measured("calibration", path.read_text())
    for kind in STEPS_OF:
        plain = estimate(plan_of(kind, evidence, None)).step_seconds
        plan = plan_of(kind, evidence, path)
        said, took = estimate(plan).step_seconds, step_seconds(plan, evidence)
        evidence.expect(f"{kind}: the estimate uses the calibration", said != plain, estimated=said)
        evidence.expect(f"{kind}: a step takes time", took > 0, seconds=took)
        seconds = {"estimated": said, "estimated without calibration": plain}
        evidence.measured(f"{kind}: seconds", {**seconds, "measured": took})
        name = f"{kind}: estimated within {TOLERANCE:.0%}"
        if evidence.on_gpu(NO_SPEED, name) and said is not None:
            evidence.expect(name, abs(said / took - 1) <= TOLERANCE, estimated=said, took=took)


FORKS = True
CHECKS = [Check("calibrate, estimate, measure", estimated_and_measured, 180)]
