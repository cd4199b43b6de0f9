"""Real `workbench run` on one device (NCCL with world size 1): precisions, kernels, recompute,
offload; checkpoint, kill, resume, stop.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from functools import partial
from typing import Any

import torch

from tests.gpu.checks import Check, Evidence
from tests.gpu.launched import START_SECONDS, STEPS, launch, losses, records_of, tiny_plan
from workbench.engine.session import Session
from workbench.engine.verify.forked_ranks import run_ranks
from workbench.parallel.mesh import build_mesh
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.schema import Plan
from workbench.runs import Run

LORA: dict[str, Any] = {
    "finetune__lora": {"rank": 16, "alpha": 64.0},
    "training__optimizer__learning_rate": 1e-2,
}
RUNS: dict[str, dict[str, Any]] = {
    "bf16 fused": {"strategy__precision": "bf16", "strategy__kernels": "fused"},
    "zero-3 offload parameters": {
        "strategy__data__zero": 3,
        "strategy__data__offload": "parameters",
        "strategy__precision": "bf16",
        "strategy__kernels": "eager",
    },
    "fp16 with loss scaling": {"strategy__precision": "fp16", "strategy__kernels": "fused"},
    "tf32": {"strategy__precision": "tf32", "strategy__kernels": "fused"},
    "bf16 eager": {"strategy__precision": "bf16", "strategy__kernels": "eager"},
    "recompute": {
        "strategy__precision": "bf16",
        "strategy__kernels": "fused",
        "strategy__recompute": "full",
    },
    "offload optimizer": {"strategy__data__zero": 1, "strategy__data__offload": "optimizer"},
    "gpt with dropout": {"model": "tiny-gpt", "training__dropout": 0.1},
    "moe": {"model": "tiny-moe", "strategy__precision": "bf16"},
    "lora": {**LORA, "strategy__precision": "bf16", "strategy__kernels": "fused"},
    "lora on nf4": {**LORA, "finetune__quantize": {"group": 32}, "strategy__precision": "bf16"},
    "fp8": {"strategy__precision": "fp8", "strategy__kernels": "eager"},
}
DRY_RUNS = ("zero-3 offload parameters",)
"""A launch takes seconds of CPU; the rest of its kinds is launched by `tests/engine`."""
LEFT_OUT = "a dry run launches one of these runs, for time"
NO_CUDA = "a CPU rank has neither NCCL nor a caching allocator"
CUT = 8
NOISE = {"fp32": 1e-4, "bf16": 3e-2}


def finishes(name: str, evidence: Evidence) -> None:
    """The run finishes; its records say what was computed, and where."""
    names = ("finishes", "every step is recorded", "the loss falls", "the first loss is log(vocab)")
    if evidence.dry and name not in DRY_RUNS:
        return evidence.left_out(LEFT_OUT, *names)
    changes = dict(RUNS[name])
    if evidence.dry:
        changes["strategy__kernels"] = "eager"
    plan = tiny_plan(evidence, changes.pop("model", "tiny"), **changes)
    run = launch(plan, evidence)
    state = run.wait(START_SECONDS)
    evidence.expect(names[0], state.phase == "finished", cause=str(state.cause))
    found = list(losses(run).values())
    evidence.expect(names[1], len(found) == STEPS, steps=len(found))
    evidence.expect(names[2], found[-1] < found[0] - 0.1, losses=found)
    first = math.log(run.plan.vocab)
    evidence.expect(names[3], abs(found[0] - first) < 0.1 * first, loss=found[0], expected=first)
    if name == "fp16 with loss scaling":
        scales = [record["loss_scale"] for record in records_of(run, "step")]
        evidence.expect("steps have a loss scale", all(scales), scales=scales)
    return on_the_gpu(run, evidence)


def on_the_gpu(run: Run, evidence: Evidence) -> None:
    """What only a run on a GPU records."""
    names = ("the backend is NCCL", "the GPU is named", "peaks of every step are recorded")
    if not evidence.on_gpu(NO_CUDA, *names):
        return
    hello, steps = records_of(run, "hello")[0], records_of(run, "step")
    evidence.expect(names[0], hello["backend"] == "nccl", backend=hello["backend"])
    evidence.expect(names[1], hello["gpu"] and hello["gpu"]["uuid"], gpu=hello["gpu"])
    peaks = [(r.get("max_memory_allocated"), r.get("max_memory_reserved")) for r in steps]
    ordered = all(mine and held and mine <= held for mine, held in peaks)
    evidence.expect(names[2], ordered, peaks=peaks[:2])
    evidence.measured("median step seconds", sorted(r["seconds"] for r in steps)[len(steps) // 2])
    evidence.measured("peaks", peaks[-1])


def killed_resumed_stopped(evidence: Evidence) -> None:
    """A rank that is killed is named; the run resumes from its checkpoint with the losses that an
    undisturbed run has; a stop that asks for a checkpoint leaves one.
    """
    precision = "fp32" if evidence.dry else "bf16"
    endless = tiny_plan(
        evidence,
        strategy__precision=precision,
        strategy__kernels="eager" if evidence.dry else "fused",
        training__steps=100_000,
        checkpoint__every=CUT,
    )
    run = launch(endless, evidence)
    # Checkpoints are written while training goes on: one must be there before the kill, and the
    # loss of the step after it, which the resumed run is compared with.
    saved = until(lambda: _last_saved(run) in losses(run), START_SECONDS)
    evidence.expect("a checkpoint is saved", saved, phase=run.state.phase)
    os.kill(records_of(run, "hello")[0]["pid"], signal.SIGKILL)
    state = run.wait(60)
    message = state.cause.message if state.cause else ""
    evidence.expect(
        "the killed rank is named", "rank 0 was killed by SIGKILL" in message, said=message
    )
    again = launch(endless, evidence, resume=run)
    reached = until(lambda: losses(again), START_SECONDS)
    evidence.expect("the resumed run takes steps", reached, phase=again.state.phase)
    before, after = losses(run), losses(again)
    first = min(after, default=-1)
    evidence.expect("it goes on at a checkpoint", first >= CUT and first % CUT == 0, first=first)
    # A run killed between a checkpoint and its next step has no loss to compare with but the last.
    expected, off = (
        (before[first], NOISE[precision]) if first in before else (before[first - 1], 0.1)
    )
    gap = abs(after[first] - expected) / expected
    evidence.expect("its losses go on", gap < off, gap=gap, allowed=off)
    again.stop(checkpoint=True)
    state = again.wait(60)
    evidence.expect("it stops", (state.phase, state.exit_code) == ("stopped", 0), phase=state.phase)
    written, last = records_of(again, "checkpoint"), max(losses(again))
    kept = bool(written) and written[-1]["step"] >= last
    evidence.expect("it leaves a checkpoint of its last step", kept, last=last)


def _last_saved(run: Run) -> int | None:
    """The step at which a run that resumes from the last checkpoint goes on."""
    saved = records_of(run, "checkpoint")
    return saved[-1]["step"] if saved else None


def until(condition: Any, seconds: float) -> bool:
    """Whether the condition comes true within `seconds`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return False


def no_host_wait(evidence: Evidence) -> None:
    """A step of a dense plan never waits for the GPU before its end."""
    name = "a step does not synchronize"
    if not evidence.on_gpu("a CPU has no stream to wait for", name):
        return
    plan = tiny_plan(evidence, strategy__precision="bf16", strategy__kernels="fused").resolve()
    error = run_ranks(1, partial(_waits, plan), 60)[0]
    evidence.expect(name, not error, error=error)


def _waits(plan: ResolvedPlan, rank: int) -> str:
    device, t = torch.device("cuda", 0), plan.training
    session = Session.build(plan, build_mesh(plan, rank, device), device)
    shape = (plan.num_microbatches, t.micro_batch, t.sequence_length)
    tokens, targets = (torch.randint(plan.vocab, shape, device=device) for _ in range(2))
    session.step(0, tokens, targets)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        session.step(1, tokens, targets)
    except RuntimeError as error:
        return str(error)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return ""


def verified_on_cpu_ranks(evidence: Evidence) -> None:
    """`workbench verify` with two CPU ranks, beside a GPU that it leaves alone."""
    name = "the plan is verified"
    if evidence.dry:
        return evidence.left_out("`tests/cli` verifies where there is no GPU", name)
    plan = Plan.of("tiny", gpu="h100-sxm-80gb", gpus=2, strategy="megatron-tp")
    path = evidence.folder / "plan.yaml"
    path.write_text(plan.to_yaml())
    command = [sys.executable, "-m", "workbench", "verify", str(path)]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=100)
    said = (answer.stdout + answer.stderr)[-1500:]
    return evidence.expect(name, answer.returncode == 0, said=said)


FORKS = True
CHECKS = [
    Check("verify on CPU ranks", verified_on_cpu_ranks, 110),
    Check("zero-3 offload parameters", partial(finishes, "zero-3 offload parameters"), 150),
    Check("kill, resume, stop", killed_resumed_stopped, 300),
    Check("no host wait", no_host_wait, 90),
    *(Check(name, partial(finishes, name), 150) for name in RUNS if name not in DRY_RUNS),
]
