"""What the machine is: torch's and NCCL's versions, GPUs, `workbench doctor`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import torch

from tests.gpu.checks import Check, Evidence
from workbench.machine.attached import attached

OLDEST, NEWEST = (2, 11), (2, 13)
DOCTOR_SECONDS = 200
"""It asks torch in two children of 90 seconds at most."""


def torch_facts(evidence: Evidence) -> None:
    """Versions and devices, as torch says."""
    release = tuple(int(part) for part in torch.__version__.split(".")[:2])
    evidence.expect("torch is supported", OLDEST <= release <= NEWEST, torch=torch.__version__)
    evidence.expect("torch has gloo", torch.distributed.is_gloo_available())
    x = torch.randn(64, 64, device=evidence.device, dtype=torch.float64)
    gap = float((x @ torch.linalg.inv(x) - torch.eye(64, device=x.device)).abs().max())
    evidence.expect("the device computes", gap < 1e-6, gap=gap)
    names = ("compute capability", "free memory", "NCCL version")
    if evidence.on_gpu("a CPU has no CUDA driver", *names):
        found = torch.cuda.get_device_properties(0)
        free, total = torch.cuda.mem_get_info()
        evidence.expect(names[0], (found.major, found.minor) >= (7, 0), gpu=found.name)
        evidence.expect(names[1], free > 0.8 * total, free=free, total=total)
        version = torch.cuda.nccl.version()
        evidence.expect(names[2], version >= (2, 18), version=version)
        evidence.measured("cuda", torch.version.cuda)
        evidence.measured("device count", torch.cuda.device_count())
        evidence.measured("uuid", str(found.uuid))


def doctor(evidence: Evidence) -> None:
    """`workbench doctor --json` answers, and finds what torch finds."""
    command = [sys.executable, "-m", "workbench", "doctor", "--json"]
    asked = subprocess.run(
        command, capture_output=True, text=True, timeout=DOCTOR_SECONDS, env=dict(os.environ)
    )
    evidence.expect("doctor answers", asked.returncode in (0, 1), stderr=asked.stderr[-500:])
    answer = json.loads(asked.stdout)
    evidence.measured("doctor", answer)
    text = json.dumps(answer)
    evidence.expect("doctor names torch's version", torch.__version__.split("+")[0] in text)
    names = ("doctor names the GPU", "memory as torch has it", "all-reduce over all GPUs")
    if evidence.on_gpu("a CPU has no GPU to find", *names):
        found = torch.cuda.get_device_properties(0)
        rows = {row["what"]: row for row in answer}
        evidence.expect(names[0], found.name in rows["devices"]["found"], gpu=found.name)
        nvml, own = attached().memory_bytes, found.total_memory
        evidence.expect(names[1], abs(nvml / own - 1) < 0.005, nvml=nvml, torch=own)
        told = rows.get("all-reduce (NCCL)", {"ok": False})
        evidence.expect(names[2], told["ok"] is True, told=told)


def tools(evidence: Evidence) -> None:
    """Which of NVIDIA's own tools are there; a figure alone."""
    for tool in ("nvidia-smi", "compute-sanitizer", "ncu", "nsys"):
        evidence.measured(tool, shutil.which(tool))


CHECKS = [
    Check("torch", torch_facts, 60),
    Check("doctor", doctor, DOCTOR_SECONDS + 10),
    Check("tools", tools, 10),
]
