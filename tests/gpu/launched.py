"""Real runs, `accelerate launch` and all, of tiny models on a text of a check's own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tests.gpu.checks import Evidence
from workbench.plan.schema import Plan
from workbench.runs import Reader, Run, start

STEPS = 20
START_SECONDS = 120.0
REPOSITORY = Path(__file__).parents[2]
Records = list[dict[str, Any]]


def tiny_plan(evidence: Evidence, model: str = "tiny", gpus: int = 1, **changes: Any) -> Plan:
    """A plan of a few steps on the attached device; `a__b` names the plan field `a.b`."""
    text = evidence.folder / "text.txt"
    text.write_text("".join(f"{n} squared is {n * n}. " for n in range(2000)))
    written = {
        "training.steps": STEPS,
        "training.sequence_length": 32 if evidence.dry else 256,
        "training.global_batch": 4 * gpus,
        "training.micro_batch": 2,
        "training.optimizer.learning_rate": 3e-3,
        "training.optimizer.warmup_steps": 2,
        "corpus.source": str(text),
    } | {name.replace("__", "."): value for name, value in changes.items()}
    strategy = "single" if gpus == 1 else "ddp"
    return Plan.of(model, gpu="local", gpus=gpus, strategy=strategy, set=written)


def launch(plan: Plan, evidence: Evidence, **more: Any) -> Run:
    """Start a run whose files are all in the check's folder; it ends with the check."""
    os.environ["XDG_CACHE_HOME"] = str(evidence.folder / "cache")
    before = os.environ.get("PYTHONPATH", "")
    if str(REPOSITORY) not in before.split(os.pathsep):
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(REPOSITORY), before)))
    return start(plan, root=evidence.folder / "runs", **more)


def records_of(run: Run, kind: str) -> Records:
    """Telemetry records of one kind so far."""
    return [record for record in Reader(run.dir).poll() if record["kind"] == kind]


def losses(run: Run, rank: int = 0) -> dict[int, float]:
    """Loss by step, as one rank recorded it."""
    return {r["step"]: r["loss"] for r in records_of(run, "step") if r["rank"] == rank}
