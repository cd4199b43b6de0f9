"""What to change in a plan after a failure, by the error and log of the rank that failed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from workbench.plan.resolved_plan import ResolvedPlan

_MEMORY = re.compile(
    r"out of memory|can't allocate memory|cannot allocate memory|MemoryError|bad_alloc",
    re.IGNORECASE,
)
_KNOWN = (
    (
        r"no space left on device",
        "Free disk space, lower checkpoint.keep, or keep runs elsewhere (--root).",
    ),
    (
        r"address already in use|EADDRINUSE",
        "Another process took the port: start again, a free one is chosen.",
    ),
    (
        r"not finite|is nan|is inf\b",
        "Lower training.optimizer.learning_rate, or lengthen warmup_steps.",
    ),
    (
        r"No available kernel",
        "No fused attention of this GPU takes heads of this head_dim in this dtype: try "
        "strategy.precision bf16 or "
        "fp16, or a head_dim that is a multiple of 8.",
    ),
    (
        r"No module named",
        "Install that module in the Python that launches the run; see `workbench doctor`.",
    ),
    (
        r"SIGKILL|SIGTERM",
        "Something outside the run killed it; where memory is short, the kernel does: watch free "
        "memory.",
    ),
    (
        r"SIGSEGV|SIGABRT|SIGBUS",
        "A library crashed: see its log. Ranks that disagree about a tensor's size abort too.",
    ),
    (
        r"time[d]? ?out|stopped answering",
        "If a step may rightly take this long, raise telemetry.timeout_seconds.",
    ),
)
"""(what is found in the text, what to do), the surest first."""


def advise(folder: Path, text: str) -> str:
    """Advice that fits `text` (an error and the log round it); empty where none is known."""
    if _MEMORY.search(text):
        from workbench.plan.schema import Plan  # only after a failure: a supervisor stays small

        return memory_advice(Plan.load(folder / "plan.yaml").resolve())
    return next(
        (advice for pattern, advice in _KNOWN if re.search(pattern, text, re.IGNORECASE)), ""
    )


def memory_advice(plan: ResolvedPlan) -> str:
    """The changes that lower a rank's memory, that this plan has not made yet and that can run;
    cheapest first.
    """
    from workbench.errors import PlanError
    from workbench.plan.rules.supported import unsupported
    from workbench.planner.plan_changes import after_out_of_memory

    useful = []
    for change, text in after_out_of_memory(plan):
        try:
            if not unsupported(plan.replace(**change).resolve(), "run"):
                useful.append(text)
        except PlanError:
            continue
    return (
        f"It ran out of memory. What would lower it: "
        f"{'; '.join(useful) or 'a smaller model or GPUs with more memory'}."
    )
