"""Operators with named dimensions, and the tensors that pass between them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class OperatorDim:
    """One dimension of an operator."""

    name: str
    size: int
    units: int = 1
    """Indivisible parts (sequences, heads, entries), which the shards divide; 1: never split."""


@dataclass(frozen=True)
class OperatorTensor:
    """An input or the output of an operator, by the operator's own dimensions."""

    name: str
    dims: tuple[str, ...]
    kind: Literal["activation", "residual", "parameter", "tied", "index"] = "activation"
    """`residual`: added to the first input before the operator, and the sum passed on beside its
    output; no part of a strategy's written form.
    """
    share: float = 1.0
    """Elements over the product of the dimensions: below 1 where query heads share key-value heads.
    """


@dataclass(frozen=True)
class Operator:
    """One operator of a layer. Dimensions of an input that the output lacks are contracted: split,
    they leave partial sums.
    """

    name: str
    kind: str
    dims: tuple[OperatorDim, ...]
    inputs: tuple[OperatorTensor, ...]
    output: OperatorTensor
    gemm_widths: tuple[int, ...] = ()
    """Columns of each GEMM that a `MatMul` runs on its one input: query, key and value; gate and
    up.
    """
    fp8: bool = False
    """Whether its GEMMs run in fp8 where the plan's precision does: those of layers, not the
    head's.
    """
    scatters: bool = False
    """Whether its partial sums may be reduce-scattered by tokens, which MindSpore's `out_strategy`
    says; else they are all-reduced.
    """
    causal_flops: float = 0.0
    """Of attention: forward FLOPs of the causal half, over all ranks."""
    sums: tuple[OperatorTensor, ...] = ()
    """Outputs beside, that are sums over rows whatever else is split: an MoE layer's aux loss."""
    named: tuple[tuple[str, ...], ...] = ()
    """Dimensions that each tuple of a strategy has, where they are not those of the inputs."""
    num_layers: int = 1
    """Layers that have it."""
    modules: tuple[str, ...] = ()
    """Patterns of the modules that it stands for."""
    traced: bool = False
    """True where it is of a user's module, whose strategies may leave dimensions out."""

    def dim(self, name: str) -> int:
        """Size of the dimension `name`."""
        return next(dim.size for dim in self.dims if dim.name == name)

    def size(self, tensor: OperatorTensor) -> float:
        """Elements of the unsharded tensor."""
        sizes = {dim.name: dim.size for dim in self.dims}
        return math.prod(sizes[name] for name in tensor.dims) * tensor.share


@dataclass(frozen=True)
class TensorEdge:
    """A tensor that operator `source` holds and operator `target` wants; dimensions correspond by
    position, whatever their order in the operators. A parameter that both use has one layout.
    """

    source: int
    source_tensor: OperatorTensor
    target: int
    target_tensor: OperatorTensor
    num_layers: int = 1
    unpadded: int | None = None
    """Entries of the last dimension without padding: where the layouts differ, its pieces divide
    them.
    """


@dataclass(frozen=True)
class OperatorGraph:
    """Operators and the tensors that pass between them."""

    operators: tuple[Operator, ...]
    edges: tuple[TensorEdge, ...]
