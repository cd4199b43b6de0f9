"""Cores of a rank: those of its GPU's NUMA node, so that launches, pinned memory and an offloaded
optimizer stay near the GPU.
"""

from __future__ import annotations

import sys

import torch
from accelerate.utils.environment import override_numa_affinity

from workbench.machine.attached import host_cores
from workbench.machine.nvml_index import nvml_index


def bind_cores(device: torch.device) -> None:
    """Bind this process and its later threads to the cores that NVML names for `device`.

    Accelerate's own launch option asks for the GPU at index LOCAL_RANK, which is another one under
    CUDA_VISIBLE_DEVICES, and ends the rank where there is no answer: NVML of a virtual machine or
    of a part of a GPU (MIG), or a container without those cores. The rank then keeps its cores.
    """
    try:
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        override_numa_affinity(nvml_index(uuid), verbose=False)
    except Exception as error:  # NVML's family, OSError of the kernel, ImportError
        print(
            f"local rank {device.index} keeps its {host_cores()} cores: those near its GPU are "
            f"not known ({type(error).__name__}: {error})",
            file=sys.stderr,
        )
