"""How the work is split over ranks: one section an axis."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import Field

from workbench.fields.bounds import InFlight, LayerIndex, Layers, Mebibytes, Ranks, Tiles
from workbench.fields.frozen import Frozen

Axis = Literal["tensor", "context", "data", "pipeline"]
AXES: tuple[Axis, ...] = ("tensor", "context", "data", "pipeline")
NarrowPrecision = Literal["fp8", "mxfp8", "nvfp4"]
Precision = Literal["fp32", "tf32", "bf16", "fp16", NarrowPrecision, "auto"]
NARROW: tuple[NarrowPrecision, ...] = ("fp8", "mxfp8", "nvfp4")
"""Precisions of layers' GEMMs alone: 8 bits with a scale for a tensor, 8 bits with one for 32
elements (OCP Microscaling Formats 1.0), 4 bits with one for 16 (2509.25149).
"""
STORED = {"tf32": "fp32", "fp8": "bf16", "mxfp8": "bf16", "nvfp4": "bf16"}
"""Precision of GEMMs -> dtype of parameters, activations and gradients, where they differ."""
GradientDtype = Literal["fp32", "bf16", "fp16", "parameters", "auto"]
TorchAttention = Literal["flash", "efficient", "blockwise", "math"]
"""Attention of this engine: kernels of torch, and its own over tiles."""
FrameworkAttention = Literal[
    "unfused", "flash-1", "flash-2", "flash-3", "flash-4", "cudnn-8", "cudnn-9"
]
"""Attention of other frameworks besides: batched GEMMs around a softmax (Hugging Face's eager),
and generations of fused kernels.
"""
Loss = Literal["whole", "chunked", "fused_linear"]
Recompute = Literal["none", "selective", "full"] | list[LayerIndex | str]
"""Layers by number, modules by a pattern of their paths: `blocks.*.mlp`."""


class Data(Frozen):
    """Data parallelism; its size is what the other axes leave over (Rajbhandari et al. 2020 for
    ZeRO).
    """

    zero: Literal[0, 1, 2, 3] = Field(
        0, description="ZeRO stage: 1 shards optimizer, 2 gradients, 3 parameters."
    )
    shard: Ranks | Literal["all"] = Field(
        "all", description="Ranks a shard group spans; rest replicate."
    )
    offload: Literal["none", "optimizer", "parameters"] = Field(
        "none", description="What lives in host memory."
    )
    offload_ratio: float = Field(
        1.0,
        ge=0,
        le=1,
        description="Share of an offloaded optimizer in host memory, by buckets; the GPU steps the "
        "rest.",
    )
    offload_tier: Literal["host", "disk"] = Field(
        "host",
        description="Where offloaded states are: host memory, or the node's NVMe disks; disk: "
        "estimated only.",
    )
    reduce: Literal["step", "microbatch"] = Field("step", description="When gradients are reduced.")
    keep_gathered: bool = Field(
        False, description="ZeRO-3 keeps gathered parameters between forward and backward."
    )
    tile_factor: Tiles = Field(
        1, description="Tiles of each linear of a layer, by outputs; ZeRO-3 gathers one at a time."
    )
    bucket_mib: Mebibytes = Field(25.0, description="Gradient bucket, MiB.")
    overlap: bool = Field(
        True, description="Hide reduction and gathering behind compute; false: estimated only."
    )
    in_flight: InFlight = Field(
        2,
        description="ZeRO-3 units gathered, and ZeRO-2 or 3 buckets reduced, at once, the one in "
        "use included.",
    )


class Tensor(Frozen):
    """Tensor parallelism (Shoeybi et al. 2019; 2-D, 2.5-D, 3-D: Colossal-AI)."""

    size: Ranks | Annotated[list[Ranks], Field(min_length=1)] = Field(
        1, description="Ranks, or the grid [q,q], [q,q,d], [l,l,l]."
    )
    algorithm: Literal["1d", "2d", "2.5d", "3d"] = Field(
        "1d", description="How matrix products are split."
    )
    sequence: bool = Field(
        False, description="Split norms and residuals over the sequence (2205.05198)."
    )

    @property
    def ranks(self) -> int:
        """Ranks of the whole tensor axis."""
        return self.size if isinstance(self.size, int) else math.prod(self.size)


class Pipeline(Frozen):
    """Pipeline parallelism (GPipe 2019, DAPPLE 2021, 2104.04473)."""

    size: Ranks = Field(1, description="Pipeline ranks.")
    schedule: str = Field(
        "1f1b",
        description="gpipe | 1f1b | eager-1f1b | interleaved | zb-h1 | zb-h2 | zb-v | dualpipe-v | "
        "a CSV.",
    )
    schedule_sha256: str | None = Field(
        None, description="Hash of the CSV; filled when a plan is resolved."
    )
    chunks: Layers = Field(1, description="Model chunks a rank.")
    partition: Literal["balanced", "uniform"] | list[LayerIndex] = Field(
        "balanced",
        description="Layers a stage: balanced by cost, uniform, or a list, 0 at its ends "
        "estimated only.",
    )
    in_flight: InFlight | list[InFlight] | None = Field(
        None,
        description="Most microbatches whose activations a stage keeps, of all or of each; null: "
        "the schedule's.",
    )
    replicas: Annotated[list[Ranks], Field(min_length=1)] | None = Field(
        None,
        description="Replicas of each stage, which share its work (DAPPLE); in all gpus / "
        "(tensor x context).",
    )
    distribution: Literal["split", "round_robin"] = Field(
        "split",
        description="What replicas of a stage share: each microbatch, or microbatches in turn.",
    )

    @property
    def is_round_robin(self) -> bool:
        """Whether the replicas of a stage take microbatches in turn."""
        return self.replicas is not None and self.distribution == "round_robin"


class Context(Frozen):
    """Context parallelism: the sequence split inside attention too."""

    size: Ranks = Field(1, description="Ranks.")
    algorithm: Literal["ring", "ulysses", "usp"] = Field(
        "ring",
        description="Ring attention, all-to-all over heads, or usp: a ring of all-to-all groups.",
    )
    ulysses_size: Ranks = Field(1, description="Ranks of an all-to-all group of usp.")

    @property
    def num_ulysses_ranks(self) -> int:
        """Neighbors that exchange heads for tokens, of whatever algorithm; the ring goes around
        their groups.
        """
        return {"ring": 1, "ulysses": self.size, "usp": min(self.size, self.ulysses_size)}[
            self.algorithm
        ]


class Expert(Frozen):
    """Expert parallelism; divides data x context, and tensor / expert.tensor, and multiplies
    nothing.
    """

    size: Ranks = Field(1, description="Ranks over which experts are spread.")
    tensor: Ranks | None = Field(
        None,
        description="Tensor ranks that split an expert; null: all of them; fewer: estimated only.",
    )


class Strategy(Frozen):
    """How the work is split. A preset supplies it; what is written beside the preset overrides
    it.
    """

    preset: str | None = Field(None, description="Name from strategies.yaml.")
    data: Data = Field(default_factory=Data, description="Data parallelism and ZeRO.")
    tensor: Tensor = Field(default_factory=Tensor, description="Tensor parallelism.")
    pipeline: Pipeline = Field(default_factory=Pipeline, description="Pipeline parallelism.")
    context: Context = Field(default_factory=Context, description="Context parallelism.")
    expert: Expert = Field(default_factory=Expert, description="Expert parallelism.")
    operators: dict[str, Any] = Field(
        default_factory=dict,
        description="Module pattern -> pieces over the tensor ranks, ((4,1),(1,1)); what none "
        "names is repeated.",
    )
    placement: list[Axis] = Field(default=list(AXES), description="Axes, innermost first.")
    recompute: Recompute = Field(
        "none",
        description="Activations recomputed in backward; a list names layers, or patterns such as "
        "blocks.*.mlp.",
    )
    offload_activations: bool = Field(
        False, description="Inputs of recomputed layers are in host memory until backward."
    )
    stack: str = Field(
        "workbench",
        description="Software that runs it: workbench; another profile: estimated only.",
    )
    precision: Precision = Field(
        "auto",
        description="Dtype of tensors; auto: bf16, else fp16, CPU fp32; of GEMMs fp8; estimated "
        "only: mxfp8, nvfp4.",
    )
    gradient_dtype: GradientDtype = Field(
        "auto",
        description="Gradients add up and are reduced in it; parameters: as they are; auto: fp32 "
        "if several add up.",
    )
    attention: Literal["auto", TorchAttention, FrameworkAttention] = Field(
        "auto",
        description="Attention kernel; auto: the best of this GPU and model, or the stack's; math "
        "keeps [T, T] scores.",
    )
    kernels: Literal["eager", "compiled", "fused", "liger"] = Field(
        "eager", description="What runs memory-bound operators; liger: of other stacks."
    )
    loss: Literal["auto", Loss] = Field(
        "auto",
        description="Logits of all tokens, of a chunk, or of none kept (head and loss in one); "
        "auto: the stack's.",
    )


def axis_sizes(strategy: Strategy, world: int) -> dict[str, int]:
    """Ranks along each axis, in `AXES` order; data takes what the others leave over.

    With `pipeline.replicas` there is no data axis of one size, and `data` is 1: the replicas of a
    stage share every microbatch, or take them in turn.
    """
    s = strategy
    others = s.tensor.ranks * s.context.size * s.pipeline.size
    return {
        "tensor": s.tensor.ranks,
        "context": s.context.size,
        "data": 1 if s.pipeline.replicas else max(1, world // others),
        "pipeline": s.pipeline.size,
    }
