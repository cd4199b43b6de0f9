"""What `doctor` says of GPUs: NVML's view, then that of a child process that asks torch.cuda."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from workbench.errors import ChildError
from workbench.machine.attached import Attached
from workbench.machine.nvml_devices import has_device_nodes
from workbench.runs.launch import child_process
from workbench.runs.launch.subprocess_verbs import gpu_check
from workbench.units import GIB

NVML_CHECK = "workbench.machine.nvml_devices"
NVML_SECONDS = 20.0
LAST_WORDS = 4
"""Lines shown of a child that failed."""
NO_GPUS = "runs use CPU ranks; a CUDA build of torch uses GPUs"
NO_DRIVER = (
    "nvidia-smi will hang or fail likewise, and so will runs; reset the GPU or restart the machine"
)
UNUSABLE = (
    "make the driver (`nvidia-smi`) and a CUDA build of torch agree; CUDA_VISIBLE_DEVICES= "
    "(empty) chooses CPU ranks"
)
UNLIKE = "name those of one model in CUDA_VISIBLE_DEVICES, with CUDA_DEVICE_ORDER=PCI_BUS_ID"
NO_CUDA = "runs on GPUs will fail likewise; see `nvidia-smi`, and the driver that this torch needs"
NO_ALL_REDUCE = (
    "runs over NCCL will fail likewise; NCCL_DEBUG=INFO says more, NCCL_P2P_DISABLE=1 whether "
    "P2P is at fault; a container needs a larger /dev/shm"
)


@dataclass(frozen=True)
class Finding:
    """One thing looked at. `ok` is None where it is optional and absent."""

    what: str
    ok: bool | None
    found: str
    fix: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    """Its numbers, for `--json`."""


def driver_problem() -> Finding | None:
    """A driver that hangs or crashes when NVML is asked, which this process would do likewise."""
    if not has_device_nodes():
        return None
    try:
        child_process.python(NVML_CHECK, [], lambda line: None, deadline_seconds=NVML_SECONDS)
    except (ChildError, ValueError) as error:
        return Finding("GPUs", False, last_words(error), NO_DRIVER)
    return None


def gpu_findings(here: Attached) -> list[Finding]:
    """The GPUs of this machine; torch is asked where NVML finds some."""
    if here.device == "cpu":
        fix = UNUSABLE if here.unusable else NO_GPUS
        return [Finding("GPUs", False if here.unusable else None, here.why_not_cuda, fix)]
    if len(names := here.names(here.count)) > 1:
        return [Finding("GPUs", False, f"not alike: {', '.join(names)}", UNLIKE), *_torch(here)]
    return _torch(here)


def _torch(here: Attached) -> list[Finding]:
    try:
        facts = gpu_check("facts")
    except (ChildError, ValueError) as error:
        return [Finding("CUDA", False, last_words(error), NO_CUDA)]
    gpus = facts["gpus"]
    found = [_versions(facts, here), *(_gpu(index, gpu) for index, gpu in enumerate(gpus))]
    found += [_p2p(facts["p2p"])] if len(gpus) > 1 else []
    return [*found, _all_reduce(len(gpus))]


def _versions(facts: dict[str, Any], here: Attached) -> Finding:
    versions = {name: facts[name] for name in ("torch", "cuda", "nccl")}
    text = f"torch {facts['torch']}, CUDA {facts['cuda']}, NCCL {facts['nccl']}"
    count = len(facts["gpus"])
    if count == here.count:
        return Finding("CUDA", True, text, facts=versions)
    return Finding("CUDA", False, f"{text}: {count} GPUs, NVML has {here.count}", NO_CUDA, versions)


def _gpu(index: int, gpu: dict[str, Any]) -> Finding:
    gib = gpu["memory_bytes"] / GIB
    text = f"{gpu['name']}, compute capability {gpu['capability']}, {gib:.1f} GiB"
    return Finding(f"GPU {index}", True, text, facts=gpu)


def _p2p(access: list[list[bool]]) -> Finding:
    """Pairs with P2P access; without it NCCL goes through host memory, which works."""
    pairs = list(combinations(range(len(access)), 2))
    lacking = [f"{a}-{b}" for a, b in pairs if not (access[a][b] and access[b][a])]
    text = f"{len(pairs) - len(lacking)} of {len(pairs)} pairs"
    if 0 < len(lacking) < len(pairs):
        text += f"; not {', '.join(lacking)}"
    return Finding("P2P access", True, text, facts={"matrix": access})


def _all_reduce(gpus: int) -> Finding:
    what = "all-reduce (NCCL)"
    try:
        facts = gpu_check("all-reduce", "--gpus", str(gpus))
    except (ChildError, ValueError) as error:
        return Finding(what, False, last_words(error), NO_ALL_REDUCE)
    rate = f"{facts['bus_gbs']:.1f} GB/s bus bandwidth (measured)" if gpus > 1 else "sum is right"
    text = f"{gpus} GPU{'s' * (gpus > 1)}, {facts['bytes'] // 2**20} MiB: {rate}"
    return Finding(what, True, text, facts=facts)


def last_words(error: Exception) -> str:
    """Why a child failed, and the last lines it said."""
    first, *rest = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    return " | ".join([first.rstrip(":"), *rest[-LAST_WORDS:]])
