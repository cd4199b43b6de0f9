"""NVML's index of a GPU, which is not CUDA's where CUDA_VISIBLE_DEVICES hides or reorders GPUs."""

from __future__ import annotations


def nvml_index(uuid: str) -> int:
    """NVML's index of the GPU with this UUID, as torch gives it (without the leading `GPU-`).

    Raises an error of NVML's family where it knows no such GPU.
    """
    import pynvml  # only where there are GPUs

    pynvml.nvmlInit()
    try:
        return int(pynvml.nvmlDeviceGetIndex(pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")))
    finally:
        pynvml.nvmlShutdown()
