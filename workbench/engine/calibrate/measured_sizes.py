"""Shapes, sizes and dtypes that are measured: both ends of every efficiency curve."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from workbench.machine.calibration_file import KINDS, AttentionKernel, Dtype, Kind
from workbench.machine.hardware import GPU
from workbench.plan.model.attention_kernel import attention_kernels

SIDES = (32, 64, 128, 256, 512, 1024)
FLAT = (
    (2048, 256, 256),
    (256, 2048, 256),
    (256, 256, 2048),
    (32, 1024, 1024),
    (1024, 32, 1024),
    (1024, 1024, 32),
    (512, 4096, 256),
    (128, 512, 128),
    (2048, 64, 192),
)
KIB, MIB = 2**10, 2**20
GPU_DTYPES: tuple[Dtype, ...] = ("fp32", "tf32", "bf16", "fp16")
FUSED_KERNELS: tuple[AttentionKernel, ...] = ("flash", "efficient")


def _probe(**sizes: int) -> Mapping[str, int]:
    return {**sizes, "microbatches": 2}


@dataclass(frozen=True)
class CalibrationSurvey:
    """Points to measure.

    Bytes of a stream are those of its three tensors, bytes of a message those of the full tensor.
    """

    gemm: tuple[tuple[int, int, int], ...] = (*((s, s, s) for s in SIDES), *FLAT)
    """(rows, columns, inner)."""
    streams: tuple[int, ...] = tuple(3 * 4**i * 16 * KIB for i in range(7))
    attention: tuple[tuple[int, int, int, int], ...] = (
        (1, 4, 64, 32),
        (1, 4, 256, 32),
        (1, 4, 512, 64),
        (4, 8, 128, 64),
    )
    """(batch, heads, sequence, head_dim)."""
    kernels: Mapping[Dtype, tuple[AttentionKernel, ...]] = field(
        default_factory=lambda: {"fp32": ("flash",), "bf16": ("flash",)}
    )
    """Attention kernels by dtype. Scores that the math kernel keeps would fill small GPUs, and
    estimates take it from its GEMMs.
    """
    messages: tuple[int, ...] = (256, 4 * KIB, 64 * KIB, 512 * KIB, 4 * MIB, 16 * MIB)
    kinds: tuple[Kind, ...] = KINDS
    dtypes: tuple[Dtype, ...] = ("fp32", "bf16")
    layers: tuple[int, int] = (1, 3)
    microbatches: tuple[int, int] = (1, 3)
    """Steps of all combinations are fitted for the host overhead per step, microbatch and layer."""
    probes: tuple[Mapping[str, int], ...] = (
        _probe(layers=2, hidden=128, heads=4, ffn=384, vocab=512, sequence=256),
        _probe(layers=2, hidden=256, heads=8, ffn=704, vocab=1024, sequence=128),
        _probe(layers=1, hidden=64, heads=2, ffn=192, vocab=512, sequence=512),
    )
    """Small models whose training step is timed; names as in `calibration_file.Probe`."""
    window: float = 0.01
    """Seconds of one visit of a point."""


@dataclass(frozen=True)
class GpuSurvey(CalibrationSurvey):
    """Points to measure on a GPU, which larger shapes saturate."""

    gemm: tuple[tuple[int, int, int], ...] = field(
        default=(
            *((s, s, s) for s in (256, 512, 1024, 2048, 4096, 8192)),
            (16384, 1024, 1024),
            (1024, 16384, 1024),
            (1024, 1024, 16384),
            (128, 8192, 8192),
            (8192, 128, 8192),
            (8192, 8192, 128),
        )
    )
    streams: tuple[int, ...] = tuple(3 * 4**i * MIB for i in range(6))
    attention: tuple[tuple[int, int, int, int], ...] = (
        (1, 32, 512, 128),
        (1, 32, 2048, 128),
        (1, 32, 8192, 128),
    )
    messages: tuple[int, ...] = (4 * KIB, 64 * KIB, MIB, 16 * MIB, 128 * MIB)
    probes: tuple[Mapping[str, int], ...] = ()


def survey_of(gpu: GPU) -> CalibrationSurvey:
    """The points for a GPU, in the dtypes and with the fused attention kernels that it has."""
    if gpu.device == "cpu":
        return CalibrationSurvey()
    dtypes: tuple[Dtype, ...] = tuple(dtype for dtype in GPU_DTYPES if dtype in gpu.tflops)
    sizes = {shape[-1] for shape in GpuSurvey().attention}
    kernels = {
        dtype: tuple(
            kernel
            for kernel in FUSED_KERNELS
            if all(kernel in attention_kernels(gpu, dtype, size) for size in sizes)
        )
        for dtype in dtypes
    }
    return GpuSurvey(dtypes=dtypes, kernels=kernels)
