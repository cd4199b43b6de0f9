"""What is said where a run cannot start, or fails for want of memory."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.gpu.checks import Check, Evidence
from tests.gpu.launched import START_SECONDS, launch, tiny_plan
from tests.gpu.ranks import ANY_GPU, gpu_name
from workbench.errors import PlanError
from workbench.plan.schema import Plan
from workbench.runs import preflight
from workbench.runs.launch.checked_launch import ready

TOO_MANY = 512


def refusal(plan: Plan) -> str:
    """What stands against a run; empty where nothing does."""
    try:
        return "; ".join(map(str, preflight(plan)))
    except PlanError as error:
        return str(error)


def more_ranks_than_gpus(evidence: Evidence) -> None:
    """Two ranks on one GPU are refused before anything starts."""
    plan = tiny_plan(evidence)
    ranks = TOO_MANY if evidence.dry else 2
    changes = {"cluster.gpus": ranks, "training.global_batch": 2 * ranks, "strategy.preset": "ddp"}
    local = refusal(plan.replace(**changes))
    evidence.expect("local: the numbers are named", f"is {ranks}, but only" in local, said=local)
    evidence.expect("local: what is legal is named", "legal with `gpu: local`: 1 to" in local)
    named = refusal(plan.replace(**changes, **{"cluster.gpu": gpu_name(evidence)}))
    evidence.expect("by name: refused", "attached" in named, said=named)


def no_driver(evidence: Evidence) -> None:
    """Without a GPU that torch can use, a plan for GPUs is refused, never run on the CPU."""
    plan = tiny_plan(evidence).replace(**{"cluster.gpu": ANY_GPU})
    path = evidence.folder / "plan.yaml"
    path.write_text(plan.to_yaml())
    command = [sys.executable, "-m", "workbench", "run", str(path)]
    answer = subprocess.run(
        [*command, "--root", str(evidence.folder / "runs")],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "-1"},
    )
    said = answer.stdout + answer.stderr
    evidence.expect("it is refused", answer.returncode not in (0, 1), code=answer.returncode)
    evidence.expect("the field is named", "cluster.gpu" in said, said=said[-800:])
    evidence.expect("no traceback", "Traceback" not in said)


def does_not_fit(evidence: Evidence) -> None:
    """A plan that by its estimate does not fit is refused with both figures and a change."""
    plan = Plan.of("llama-3-70b", gpu="local", gpus=1, strategy="single")
    try:
        ready(plan, root=evidence.folder / "runs")
        said = ""
    except PlanError as error:
        said = str(error)
    evidence.expect("both figures are named", "does not fit: the estimate needs" in said, said=said)
    evidence.expect("--force is named", "--force" in said)


def too_large(evidence: Evidence) -> Plan:
    """17 billion parameters in bf16 and their optimizer, more than a GPU holds."""
    wide = {"layers": 4, "hidden": 16384, "heads": 64, "kv_heads": 64, "ffn": 65536, "vocab": 4096}
    changes = {"model": wide, "strategy.precision": "bf16"}
    return tiny_plan(evidence, training__steps=2).replace(**changes)


def out_of_memory(evidence: Evidence) -> None:
    """A run that is out of memory says so, with advice."""
    names = ("it fails", "the cause is memory", "advice is given")
    if not evidence.on_gpu("a host that is out of memory harms what else runs there", *names):
        return
    run = launch(too_large(evidence), evidence, force=True)
    state = run.wait(START_SECONDS)
    evidence.expect(names[0], state.phase == "failed", phase=state.phase)
    message, advice = (state.cause.message, state.cause.advice) if state.cause else ("", "")
    evidence.expect(names[1], "out of memory" in message.lower(), said=message)
    evidence.expect(names[2], advice, advice=advice)


CHECKS = [
    Check("more ranks than GPUs", more_ranks_than_gpus, 60),
    Check("no driver", no_driver, 90),
    Check("does not fit", does_not_fit, 60),
    Check("out of memory", out_of_memory, 150),
]
