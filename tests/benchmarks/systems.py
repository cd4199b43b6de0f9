"""The systems of `systems_table`: each as a plan of a few CPU ranks, its papers and notebooks."""

from __future__ import annotations

from typing import Any, NamedTuple


class System(NamedTuple):
    """One system, or one technique of a system."""

    name: str
    papers: tuple[str, ...]
    """arXiv numbers."""
    preset: str
    ranks: int
    notebooks: tuple[str, ...]
    changes: dict[str, Any] = {}  # noqa: RUF012  (a NamedTuple's default, never changed)
    """Of the plan, beside the preset."""
    experts: bool = False
    splits_operators: bool = False
    module: dict[str, Any] | None = None
    """A model given as Python."""

    @property
    def written(self) -> str:
        """Preset and changes, as the table shows them."""
        own = [f"{key.removeprefix('strategy.')}: {value}" for key, value in self.changes.items()]
        own += ["operators: columns, then rows"] * self.splits_operators
        own += ["a torch module"] * (self.module is not None)
        return ", ".join([f"`{self.preset}`", *own])


def tensor_grid(*sizes: int) -> dict[str, Any]:
    """A grid of tensor ranks."""
    return {"strategy.tensor.size": list(sizes)}


MEMORY, ZERO, OFFLOAD = "10_memory_of_100b", "11_data_parallel_and_zero", "12_offload_13b"
TENSOR, SEQUENCE, OPERATORS = (
    "13_tensor_parallel",
    "14_sequence_and_context",
    "15_operator_strategies",
)
PIPELINES, DAPPLE, HYBRID = "16_pipelines", "17_dapple", "18_hybrid_and_topology"
PRECISION, EXPERTS, MODULE = "19_precision_and_recompute", "20_experts", "21_your_own_module"
FUSION = "02_graph_kernel_fusion"
TP, PP = "strategy.tensor.size", "strategy.pipeline.size"
SYSTEMS = (
    System("one device", (), "single", 1, (MEMORY,)),
    System("data parallel (DDP)", ("2006.15704",), "ddp", 2, (ZERO,)),
    System("ZeRO-1", ("1910.02054",), "zero-1", 2, (ZERO,)),
    System("ZeRO-2", ("1910.02054",), "zero-2", 2, (ZERO,)),
    System("ZeRO-3", ("1910.02054",), "zero-3", 2, (ZERO,)),
    System("FSDP", ("2304.11277",), "fsdp", 2, (ZERO,)),
    System(
        "FSDP, hybrid sharding",
        ("2304.11277",),
        "hybrid-shard",
        4,
        (ZERO,),
        {"strategy.data.shard": 2},
    ),
    System("ZeRO-Offload", ("2101.06840",), "zero-offload", 2, (OFFLOAD,)),
    System("ZeRO-Infinity", ("2104.07857",), "zero-infinity", 2, (OFFLOAD,)),
    System("GPipe", ("1811.06965",), "gpipe", 2, (PIPELINES,)),
    System("DAPPLE, 1F1B", ("2007.01045",), "dapple", 2, (PIPELINES, DAPPLE)),
    System(
        "DAPPLE, unequal replicas",
        ("2007.01045",),
        "dapple",
        3,
        (DAPPLE,),
        {PP: 2, "strategy.pipeline.replicas": [2, 1], "training.micro_batch": 2},
    ),
    System(
        "PipeDream, microbatches in turn",
        (),
        "dapple",
        3,
        (DAPPLE,),
        {
            PP: 2,
            "strategy.pipeline.replicas": [2, 1],
            "strategy.pipeline.distribution": "round_robin",
        },
    ),
    System("interleaved 1F1B", ("2104.04473",), "interleaved", 2, (PIPELINES,)),
    System("zero bubble, ZB-H1", ("2401.10241",), "zero-bubble", 2, (PIPELINES,)),
    System("zero bubble, ZB-V", ("2405.15362",), "zb-v", 2, (PIPELINES,)),
    System("DualPipe-V", ("2412.19437",), "dualpipe-v", 2, (PIPELINES,)),
    System("Megatron-LM, 1-D tensor parallel", ("1909.08053",), "megatron-tp", 2, (TENSOR,)),
    System("Megatron-LM, sequence parallel", ("2205.05198",), "megatron-sp", 2, (SEQUENCE,)),
    System(
        "Colossal-AI, 2-D",
        ("2104.05343",),
        "colossal-2d",
        4,
        (TENSOR,),
        {**tensor_grid(2, 2), "training.micro_batch": 2},
    ),
    System(
        "Colossal-AI, 2.5-D",
        ("2105.14500",),
        "colossal-2.5d",
        8,
        (TENSOR,),
        {**tensor_grid(2, 2, 2), "training.micro_batch": 4},
    ),
    System(
        "Colossal-AI, 3-D",
        ("2105.14450",),
        "colossal-3d",
        8,
        (TENSOR,),
        {**tensor_grid(2, 2, 2), "training.micro_batch": 4},
    ),
    System("ring attention", ("2310.01889",), "ring-attention", 2, (SEQUENCE,)),
    System("DeepSpeed-Ulysses", ("2309.14509",), "ulysses", 2, (SEQUENCE,)),
    System("USP", ("2405.07719",), "usp", 4, (SEQUENCE,)),
    System(
        "expert parallel (GShard, Switch)",
        ("2006.16668", "2101.03961"),
        "expert-parallel",
        2,
        (EXPERTS,),
        experts=True,
    ),
    System(
        "a strategy for each operator (MindSpore, Alpa)",
        ("2201.12023",),
        "ddp",
        2,
        (OPERATORS,),
        {TP: 2},
        splits_operators=True,
    ),
    System("Megatron-LM, tensor x pipeline", ("2104.04473",), "tensor-pipeline", 4, (HYBRID,)),
    System("Megatron-LM, 3-D", ("2104.04473",), "megatron-3d", 8, (HYBRID,)),
    System("DeepSpeed, 3-D with ZeRO-1", ("2201.11990",), "deepspeed-3d", 8, (HYBRID,)),
    System("PanGu-α, five dimensions", ("2104.12369",), "pangu-5d", 8, (HYBRID,), {TP: 2, PP: 2}),
    System("Llama 3, 4-D", ("2407.21783",), "llama-3-4d", 8, (HYBRID, SEQUENCE), {TP: 2}),
    System("DeepSeek-V3", ("2412.19437",), "deepseek-v3", 4, (PIPELINES, EXPERTS), experts=True),
    System(
        "activation checkpointing",
        ("1604.06174",),
        "ddp",
        2,
        (PRECISION,),
        {"strategy.recompute": "full"},
    ),
    System(
        "mixed precision", ("1710.03740",), "ddp", 2, (PRECISION,), {"strategy.precision": "bf16"}
    ),
    System(
        "fp8 GEMMs",
        ("2209.05433",),
        "ddp",
        2,
        (PRECISION,),
        {"strategy.precision": "fp8", "cluster.gpu": "h100-sxm-80gb"},
    ),
    System(
        "placement on the topology",
        ("2104.04473",),
        "tensor-pipeline",
        4,
        (HYBRID,),
        {"strategy.placement": ["pipeline", "context", "data", "tensor"]},
    ),
    System("graph-kernel fusion", (), "ddp", 2, (FUSION,), {"strategy.kernels": "fused"}),
    System(
        "a torch module of one's own",
        ("2201.12023",),
        "ddp",
        2,
        (MODULE,),
        module={"python": "tests.parallel.users_model:build", "vocab": 260},
    ),
)
