"""The linear layers of a model's blocks, by name and size, and those that have adapters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from workbench.plan.model.model_shape import Shape
from workbench.plan.schema import Lora

ATTENTION = "attention."
ROW_PARALLEL = ("o", "down")
"""Last names of the layers that tensor parallelism shards by inputs (1909.08053)."""


class LinearSize(NamedTuple):
    """Widths of a linear layer, of which an MoE layer has one for each routed expert."""

    outputs: int
    inputs: int
    experts: int | None = None


def block_linears(shape: Shape, layer: int) -> dict[str, LinearSize]:
    """The linear layers of a block, by name in it; routers are none of them.

    Args:
        shape: The model.
        layer: Index of the block.
    """
    found = {ATTENTION + name: size for name, size in _attention(shape)}
    moe = shape.moe
    if moe is None or layer < moe.first_dense:
        return found | {f"mlp.{name}": size for name, size in _feed_forward(shape, shape.ffn)}
    routed = _feed_forward(shape, moe.ffn)
    found |= {f"mlp.experts.{name}": size._replace(experts=moe.experts) for name, size in routed}
    if moe.shared:
        shared = _feed_forward(shape, moe.shared * moe.ffn)
        found |= {f"mlp.shared.{name}": size for name, size in shared}
    return found


def _attention(shape: Shape) -> Iterator[tuple[str, LinearSize]]:
    hidden, mla = shape.hidden, shape.mla
    if mla is None:
        yield "q", LinearSize(shape.q_width, hidden)
        yield "k", LinearSize(shape.kv_width, hidden)
        yield "v", LinearSize(shape.kv_width, hidden)
        yield "o", LinearSize(hidden, shape.q_width)
        return
    if mla.q_rank:
        yield "q_down", LinearSize(mla.q_rank, hidden)
    yield "q", LinearSize(shape.q_width, mla.q_rank or hidden)
    yield "kv_down", LinearSize(mla.kv_rank + mla.rope_dim, hidden)
    yield "kv_up", LinearSize(shape.heads * (mla.nope_dim + mla.value_dim), mla.kv_rank)
    yield "o", LinearSize(hidden, shape.heads * mla.value_dim)


def _feed_forward(shape: Shape, width: int) -> Iterator[tuple[str, LinearSize]]:
    for name in ("gate", "up") if shape.gated else ("up",):
        yield name, LinearSize(width, shape.hidden)
    yield "down", LinearSize(shape.hidden, width)


def model_linears(shape: Shape) -> dict[str, LinearSize]:
    """The linear layers of all blocks, by path: `blocks.0.attention.q` and so on."""
    return {
        f"blocks.{layer}.{name}": size
        for layer in range(shape.layers)
        for name, size in block_linears(shape, layer).items()
    }


def adapted_linears(shape: Shape, lora: Lora) -> dict[str, LinearSize]:
    """Those of `model_linears` that have an adapter."""
    linears = model_linears(shape)
    return {path: size for path, size in linears.items() if is_adapted(path, lora)}


def adapter_parameters(shape: Shape, lora: Lora) -> int:
    """Parameters of all adapters: rank x (inputs + outputs) of each adapted layer."""
    sizes = adapted_linears(shape, lora).values()
    return sum((size.experts or 1) * lora.rank * (size.outputs + size.inputs) for size in sizes)


def adapted_by_layer(shape: Shape, lora: Lora) -> tuple[tuple[str, ...], ...]:
    """Names in their block of the linear layers that have an adapter, by block, in its order."""
    return tuple(
        tuple(
            name
            for name in block_linears(shape, layer)
            if is_adapted(f"blocks.{layer}.{name}", lora)
        )
        for layer in range(shape.layers)
    )


def first_backward_layer(adapted: Sequence[Sequence[str]], first_stage: int) -> int:
    """Index of the first block that has a backward, where all but adapters is frozen.

    Args:
        adapted: As `adapted_by_layer`.
        first_stage: Number of blocks of the first pipeline stage; later ones receive inputs with
            gradients.
    """
    return next((i for i, names in enumerate(adapted[:first_stage]) if names), first_stage)


def is_adapted(path: str, lora: Lora) -> bool:
    """Whether the linear layer at `path` has an adapter.

    A pattern is that of a path, or of its last names: `attention.[qv]` is query and value of every
    block, `blocks.[0-3].*` every layer of four blocks.
    """
    if lora.targets == "all":
        return True
    if lora.targets == "attention":
        return f".{ATTENTION}" in path
    return any(
        fnmatchcase(path, pattern) or fnmatchcase(path, f"*.{pattern}") for pattern in lora.targets
    )


def adapter_scale(lora: Lora) -> float:
    """What an adapter's output is multiplied by: alpha / rank (2106.09685), or alpha / sqrt(rank)
    (2312.03732).
    """
    return lora_scale(lora.alpha, lora.rank, lora.rslora)


def lora_scale(alpha: float, rank: int, rslora: bool) -> float:
    """The same of numbers that need not be a plan's."""
    return alpha / (rank**0.5 if rslora else rank)
