"""NCCL between GPUs, a rank each: every axis and schedule against one device; ranks that freeze or
abort. A dry run has gloo's ranks on CPU tensors.
"""

from __future__ import annotations

import os
import signal
from functools import partial

from tests.gpu.checks import Check, Evidence
from tests.gpu.launched import START_SECONDS, launch, losses, records_of, tiny_plan
from tests.gpu.parts.launched_runs import until
from tests.gpu.parts.staged_ranks import MOE, PLANS
from tests.gpu.ranks import expect_equal
from tests.parallel.small import plan
from workbench.plan.schema import Plan
from workbench.runs.launch import subprocess_verbs

CHUNKS = {
    "1f1b": 1,
    "eager-1f1b": 1,
    "gpipe": 1,
    "interleaved": 2,
    "zb-h1": 1,
    "zb-h2": 1,
    "zb-v": 2,
    "dualpipe-v": 2,
}
TIMEOUT_SECONDS = 20


def scheduled(schedule: str) -> Plan:
    """An MoE on two stages."""
    by_path = {"strategy.pipeline.schedule": schedule, "strategy.pipeline.chunks": CHUNKS[schedule]}
    return plan(pipeline=2, moe=MOE, changes=by_path)


EQUAL = {f"schedule {name}": scheduled(name) for name in CHUNKS} | PLANS


def equals_one_device(name: str, evidence: Evidence) -> None:
    """Loss, gradients and weights after three steps; every group is used once before."""
    ranks = EQUAL[name].cluster.gpus
    if ranks <= evidence.gpus:
        expect_equal(EQUAL[name], evidence, "nccl")
    else:
        evidence.left_out(f"it needs {ranks} GPUs", "loss", "gradients", "weights")


def disturbed(number: signal.Signals, evidence: Evidence) -> None:
    """The rank that is frozen or killed is named, not those that wait for it."""
    endless = tiny_plan(
        evidence,
        gpus=2,
        training__steps=1_000_000,
        telemetry__timeout_seconds=TIMEOUT_SECONDS,
        strategy__precision="fp32",
    )
    run = launch(endless, evidence)
    reached = until(lambda: max(losses(run, 1), default=0) >= 2, START_SECONDS)
    evidence.expect("steps are taken", reached, phase=run.state.phase)
    pids = {record["rank"]: record["pid"] for record in records_of(run, "hello")}
    os.kill(pids[1], number)
    state = run.wait(4 * TIMEOUT_SECONDS)
    evidence.expect("the run fails", state.phase == "failed", phase=state.phase)
    cause = state.cause
    evidence.expect("rank 1 is named", cause and cause.rank == 1, cause=str(cause)[:1000])
    evidence.measured("cause", cause.message if cause else None)


def verifies_as_launched(name: str, precision: str, evidence: Evidence) -> None:
    """`workbench verify --on gpu`: ranks of `accelerate launch`, each against its own GPU."""
    changed = EQUAL[name].replace(**{"cluster.gpu": "local"})
    said = "the launched verification passes"
    if evidence.dry or changed.cluster.gpus > evidence.gpus:
        return evidence.left_out(f"it needs {changed.cluster.gpus} GPUs", said)
    answer = subprocess_verbs.verify(changed, precision, on="gpu")
    evidence.expect(said, answer["passed"], worst=str(answer["worst"]))
    evidence.measured("largest relative differences", answer["max_relative_diff"])


FORKS = True
CHECKS = [
    *(
        Check(
            f"verify --on gpu, {name} {precision}",
            partial(verifies_as_launched, name, precision),
            150,
        )
        for name in ("megatron-tp", "schedule 1f1b")
        for precision in ("fp32", "bf16")
    ),
    *(Check(name, partial(equals_one_device, name), 100) for name in EQUAL),
    Check("a frozen rank", partial(disturbed, signal.SIGSTOP), 240),
    Check("an aborted rank", partial(disturbed, signal.SIGABRT), 240),
]
