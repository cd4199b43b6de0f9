"""Cores and threads of a rank: of its GPU's NUMA node, so that launches, pinned memory and an
offloaded optimizer stay near the GPU.
"""

from __future__ import annotations

import os
import sys

import torch

from workbench.machine.attached import host_cores
from workbench.machine.nvml_index import nvml_cores


def bind_cores(device: torch.device, local_ranks: int = 1) -> None:
    """Bind this process and its later threads to those of its cores that NVML names for `device`,
    and let it have no more threads than its share of them.

    Where there is no answer (NVML of a virtual machine or of a part of a GPU, MIG), or none of the
    process's own cores is near, the rank keeps its cores. Accelerate's own launch option asks for
    the GPU at index LOCAL_RANK, which is another one under CUDA_VISIBLE_DEVICES, and takes cores
    that a batch system has given to another job.

    Args:
        device: The rank's GPU.
        local_ranks: Ranks of this node, on its first so many GPUs.
    """
    own = os.sched_getaffinity(0)
    try:
        near = [_near(torch.device("cuda", index)) for index in range(local_ranks)]
        cores = own & near[device.index]
        os.sched_setaffinity(0, cores or own)
    except Exception as error:  # NVML's family, OSError of the kernel, ImportError
        print(
            f"local rank {device.index} keeps its {host_cores()} cores: those near its GPU are "
            f"not known ({type(error).__name__}: {error})",
            file=sys.stderr,
        )
        return
    sharing = near.count(near[device.index]) if cores else local_ranks
    limit_threads(len(cores or own) // sharing)


def limit_threads(cores: int) -> None:
    """Let torch have no more threads than cores: those that share one would wait for each other at
    every parallel loop. A launch cannot know a container's share of cores, nor which are near.
    """
    torch.set_num_threads(min(max(1, cores), torch.get_num_threads()))


def _near(device: torch.device) -> set[int]:
    return nvml_cores(str(torch.cuda.get_device_properties(device).uuid))
