"""Shapes, sizes and dtypes that are measured: both ends of every efficiency curve."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from workbench.machine.calibration_file import KINDS, AttentionKernel, Dtype, Kind, OperatorKind
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


_SEAM_SHAPES = (
    (4, 32, 1),
    (32, 64, 1),
    (64, 256, 1),
    (256, 256, 1),
    (512, 1024, 1),
    (2048, 1024, 1),
)
"""(rows, columns, 1) of elementwise operators, from ones of which only the host is seen."""
_ATTENTION_SHAPES = (
    (2, 4, 8),
    (4, 64, 32),
    (8, 128, 64),
    (4, 256, 32),
    (8, 512, 64),
    (4, 1024, 32),
)
OPERATORS: Mapping[OperatorKind | Literal["copies"], tuple[tuple[int, int, int], ...]] = {
    "linear": (
        (4, 16, 16),
        *((rows, n, k) for rows in (48, 192, 768) for n, k in ((96, 96), (96, 448), (448, 96))),
        *((rows, n, k) for rows in (64, 320, 1280) for n, k in ((320, 320), (320, 1280))),
        *((rows, n, k) for rows in (64, 320) for n, k in ((1280, 320), (1280, 1280))),
    ),
    **dict.fromkeys(("rmsnorm", "layernorm", "rope", "copies", "swiglu", "gelu"), _SEAM_SHAPES),
    "head_loss": (
        (4, 256, 16),
        (96, 640, 96),
        (384, 640, 96),
        (96, 3072, 320),
        (768, 1024, 192),
        (384, 3072, 192),
        (64, 8192, 448),
    ),
    "embedding": ((4, 16, 256), (96, 96, 640), (768, 96, 640), (96, 320, 3072), (768, 448, 8192)),
    "attention": _ATTENTION_SHAPES,
    "ring_step": _ATTENTION_SHAPES,
    "grouped_linear": (
        (2, 16, 16),
        (24, 96, 160),
        (96, 96, 160),
        (24, 320, 320),
        (96, 160, 320),
        (384, 320, 96),
    ),
    "routing": ((8, 16, 4), (192, 96, 4), (192, 96, 16), (768, 96, 8), (1536, 320, 16)),
    "adamw": tuple((rows, 1, 1) for rows in (2**10, 2**14, 2**17, 2**20, 2**23)),
}
"""Shapes of each operator as in `calibration_file.Operator`; `copies` are taken off rope's time."""


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
    messages: tuple[int, ...] = (256, 16 * KIB, 128 * KIB, MIB, 8 * MIB)
    kinds: tuple[Kind, ...] = KINDS
    dtypes: tuple[Dtype, ...] = ("fp32", "bf16")
    layers: tuple[int, int] = (1, 3)
    microbatches: tuple[int, int] = (1, 3)
    """Steps of all combinations are fitted for the host overhead per step, microbatch and layer."""
    operators: Mapping[OperatorKind | Literal["copies"], tuple[tuple[int, int, int], ...]] = field(
        default_factory=lambda: OPERATORS
    )
    probes: tuple[Mapping[str, int], ...] = (
        _probe(layers=2, hidden=128, heads=4, ffn=384, vocab=512, sequence=256),
        _probe(layers=2, hidden=256, heads=8, ffn=704, vocab=1024, sequence=128),
        _probe(layers=1, hidden=64, heads=2, ffn=192, vocab=512, sequence=512),
    )
    """Small models whose training step is timed; names as in `calibration_file.Probe`."""
    stepped: tuple[int, ...] = (25 * MIB // 4,) * 3
    """Parameters of each bucket that is stepped in host memory: their states leave every cache."""
    window: float = 0.01
    """Seconds of one visit of a point."""
    together: float = 0.06
    """The same of a collective with the work between its calls: how late ranks wake up varies from
    call to call.
    """

    host: float = 0.1
    """The same of a step of a tiny model, and of chains of operators: what the host takes by layer
    and microbatch is the difference of such steps.
    """

    def window_of(self, how: str) -> float:
        """Seconds of one visit of a point that is measured so."""
        return {"together": self.together, "host": self.host}.get(how, self.window)


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
    operators: Mapping[OperatorKind | Literal["copies"], tuple[tuple[int, int, int], ...]] = field(
        default_factory=dict
    )


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
