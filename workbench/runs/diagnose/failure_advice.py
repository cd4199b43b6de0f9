"""What to change in a plan after a failure, by the error and log of the rank that failed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.units import GIB

if TYPE_CHECKING:
    from workbench.plan.resolved_plan import ResolvedPlan

_MEMORY = re.compile(
    r"out of memory|can't allocate memory|cannot allocate memory|MemoryError|bad_alloc"
    r"|STATUS_ALLOC_FAILED",
    re.IGNORECASE,
)
HUNG = "its steps took at most"
"""Words for a rank that is late by far more than a step takes (`RankStatus.where`)."""
NETWORK = (
    "`workbench doctor` measures an all-reduce between the GPUs of a machine; between machines, "
    "name the interface in NCCL_SOCKET_IFNAME, try NCCL_IB_DISABLE=1, and see the launch's log "
    "with NCCL_DEBUG=INFO. A GPU that failed is in `dmesg` (Xid)."
)
_KNOWN = (
    (
        r"\bXid\b|uncorrectable ECC|fallen off the bus|GPU is lost|NVLink error",
        "The GPU or its link failed: `dmesg` and `nvidia-smi -q` say how (NVIDIA's list of Xid "
        "errors), and restarting will not fix it. Take that GPU or machine out, reset it, and "
        "resume from the last checkpoint.",
    ),
    (
        r"Duplicate GPU detected",
        "Two ranks use one GPU: give every rank its own (cluster.gpus of a machine at most its "
        "GPUs), and let the launcher choose among CUDA_VISIBLE_DEVICES.",
    ),
    (
        r"driver version is insufficient|Driver/library version mismatch|forward compatibility"
        r"|driver on your system is too old|PTX was compiled with an unsupported toolchain",
        "The NVIDIA driver does not fit this torch's CUDA: update the driver (after an update, "
        "restart the machine), or install a torch for its CUDA version; `workbench doctor` shows "
        "both.",
    ),
    (
        r"no kernel image is available",
        "This torch was not built for this GPU's compute capability: install one that was; "
        "`workbench doctor` shows both.",
    ),
    (
        r"illegal memory access|device-side assert triggered|misaligned address"
        r"|unspecified launch failure",
        "A kernel read or wrote where it must not: CUDA_LAUNCH_BLOCKING=1 shows which; `kernels: "
        "eager` tells whether a fused one is at fault.",
    ),
    (
        r"busy or unavailable",
        "Another process holds the GPU (its compute mode allows one), or it was just reset: "
        "`nvidia-smi` shows both.",
    ),
    (
        r"watchdog was stuck",
        "A call of CUDA or NCCL did not return on that rank: the stack in its log says which; "
        "`dmesg` shows whether its GPU failed (Xid).",
    ),
    (
        r"ncclRemoteError|ncclSystemError|NET/(?:IB|Socket|OFI)[^\n]*(?:error|fail|completion)"
        r"|\bibv_\w+[^\n]*fail|no route to host"
        r"|network is unreachable|No socket interface found|Connection closed by remote peer",
        NETWORK,
    ),
    (
        r"no space left on device",
        "Free disk space, lower checkpoint.keep, or keep runs elsewhere (--root).",
    ),
    (
        r"address already in use|EADDRINUSE",
        "Another process took the port: start again, a free one is chosen.",
    ),
    (r"get intact weights", ""),  # the message says it: nothing was trained yet
    (
        r"replicas must be equal to the bit",
        "The memory of one of these ranks, or a collective, changed bits: {resume}, and where it "
        "comes again look for ECC errors on their machines (`dmesg`, `nvidia-smi -q`).",
    ),
    (
        r"alone (?:is|are) not finite",
        "That rank's part alone is not finite, which a learning rate seldom does: look at what it "
        "read in that step and at its memory (`dmesg`, `nvidia-smi -q`: ECC errors); {resume}.",
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
        r"is frozen",
        "Something stopped its process (SIGSTOP, a debugger, a suspended job): `kill -CONT` lets "
        "it go on, in time; now {resume}.",
    ),
    (
        r"SIGKILL|SIGTERM",
        "Something outside the run killed it; where memory is short, the Linux OOM killer does: "
        "watch free memory.",
    ),
    (
        r"in different order|wait for each other|Timed out waiting \d+ ?ms for (?:recv|send)",
        "Ranks did not make the same calls, or the network between them failed: see {log} and "
        "those of the other ranks for code that some ranks alone run.",
    ),
    (
        rf"(?:stopped answering|no rank has|furthest behind|did not enter|timed out)"
        rf".*{HUNG}",
        "It hung, for no step of this run took as long: a loop, a lock or a call that does not "
        "return. The end of {log} says how far it came; `py-spy dump --pid` shows the line where "
        "it hangs again. Then {resume}.",
    ),
    (
        r"NCCL timed out|did not enter|left no record",
        "Look at what that rank does in {log}. If a step may rightly take this long, raise "
        "telemetry.timeout_seconds.",
    ),
    (
        r"SIGSEGV|SIGABRT|SIGBUS",
        "A library crashed: see its log. Ranks that disagree about a tensor's size abort too.",
    ),
    (
        r"time[d]? ?out|stopped answering|furthest behind|no rank has",
        "Look at what is waited for in {log}. If a step may rightly take this long, raise "
        "telemetry.timeout_seconds.",
    ),
)
"""(what is found in the text, what to do), the surest first. {log} is the rank's log, {resume} what
it goes on from.
"""


def advise(folder: Path, text: str, rank: int | None = None) -> str:
    """Advice that fits `text` (an error of `rank` and the log round it; None: of the launcher);
    empty where none is known.
    """
    if _MEMORY.search(text):
        from workbench.plan.schema import Plan  # only after a failure: a supervisor stays small

        plan = Plan.load(folder / "plan.yaml").resolve()
        return memory_figures(plan, text) + memory_advice(plan)
    found = (advice for pattern, advice in _KNOWN if re.search(pattern, text, re.IGNORECASE))
    filled = {"{log}": _log(folder, rank), "{resume}": _resume(folder)}
    return re.sub("|".join(filled), lambda name: filled[name[0]], next(found, ""))


def advise_or_log(folder: Path, text: str, rank: int | None) -> str:
    """Advice as of `advise`; the log where none is known."""
    return advise(folder, text, rank) or f"See {_log(folder, rank)}."


def _log(folder: Path, rank: int | None) -> str:
    return str(folder / "logs" / ("launcher.log" if rank is None else f"rank{rank:05d}.log"))


def _resume(folder: Path) -> str:
    """Advice on what the run in `folder` goes on from."""
    from workbench.checkpoint.resume_point import finished_checkpoints  # as above

    saved = finished_checkpoints(folder / "checkpoints")
    if not saved:
        return "start again, for it left no checkpoint (checkpoint.every)"
    return f"resume from {saved[-1].name} (`workbench run PLAN --resume {folder.name}`)"


def memory_figures(plan: ResolvedPlan, text: str) -> str:
    """What the plan was estimated to take, beside what the allocator of torch said it had."""
    from workbench.errors import PlanError
    from workbench.planner.estimate import estimate

    found = [f"{name} {size[1]}" for name, pattern in _ALLOCATOR if (size := pattern.search(text))]
    try:
        peak = max(estimate(plan).peak_bytes_by_rank.values()) / GIB
        estimated = f"estimated peak {peak:.2f} GiB a rank"
    except PlanError:  # of models that are trained and not estimated
        estimated = ""
    facts = "; ".join(word for word in (estimated, *found) if word)
    return f"Memory: {facts}. " if facts else ""


_ALLOCATOR = tuple(
    (name, re.compile(pattern))
    for name, pattern in (
        ("of the GPU's", r"total capacity of ([\d.]+ \w+)"),
        ("free", r"of which ([\d.]+ \w+) is free"),
        ("allocated", r"([\d.]+ \w+) is allocated by PyTorch"),
        ("reserved but unallocated", r"([\d.]+ \w+) is reserved by PyTorch but unallocated"),
        ("asked for", r"Tried to allocate ([\d.]+ \w+)"),
    )
)
"""Figures of torch.OutOfMemoryError."""


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
