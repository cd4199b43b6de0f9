"""The operators of a transformer, from its shape and the tokens of one microbatch: a layer, or the
whole model.

Query, key and value are one product, and so are gate and up: they read the same input, whose
gradient is summed once. Biases and learned positions are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from workbench.plan.model.model_shape import Shape
from workbench.plan.operators.operator_graph import (
    Operator,
    OperatorGraph,
    OperatorTensor,
    TensorEdge,
)
from workbench.planner.autoshard.layers.block_operators import ENTRY, Block, block_operators
from workbench.planner.autoshard.layers.common_operators import token_rows
from workbench.planner.autoshard.layers.end_operators import end_operators


def layer_graph(shape: Shape, sequences: int, length: int, fused: bool = False) -> OperatorGraph:
    """One block among many, with experts where the model has them: what leaves it enters the next,
    split in the same way. Raises `PlanError`.
    """
    block = block_operators(shape, sequences, length, fused, shape.moe is not None)
    again = [(name, ENTRY, place) for name, place in block.exits]
    return OperatorGraph(block.operators, _edges(block.operators, [*block.edges, *again]))


def branch_graph(
    shape: Shape, sequences: int, length: int, fused: bool, name: Literal["attention", "mlp"]
) -> OperatorGraph:
    """A block's attention or feed-forward branch, from its norm to its last product: a chain, if
    attention is fused.
    """
    block = block_operators(shape, sequences, length, fused, shape.moe is not None)
    operators = tuple(op for op in block.operators if op.name.startswith(name))
    inside = {op.name for op in operators}
    edges = [edge for edge in block.edges if {edge[0], edge[1]} <= inside]
    return OperatorGraph(operators, _edges(operators, edges))


def model_graph(
    shape: Shape,
    sequences: int,
    length: int,
    fused: bool = False,
    runs: Sequence[int] | None = None,
) -> OperatorGraph:
    """The whole model: embedding, blocks, norm, head, loss.

    Args:
        shape: The model.
        sequences: Of one microbatch over all ranks.
        length: Tokens of a sequence.
        fused: Whether attention is one operator that keeps no scores.
        runs: Numbers of consecutive layers that share one choice; default: all layers. Layers with
            experts and those without share none.

    Raises:
        PlanError: The shape has layers without operator strategies.
    """
    first, final = end_operators(shape, token_rows(sequences, length))
    parts = [*_parts(shape, sequences, length, fused, runs or (shape.layers,))]
    operators = (first, *(op for part in parts for op in part.operators), *final)
    edges = [("embedding", parts[0].prefix + ENTRY, 0, 1)]
    for part, entry in zip(parts, [*(p.prefix + ENTRY for p in parts[1:]), "final_norm"]):
        edges += [(*edge, part.num_layers) for edge in part.inside]
        edges += [(*edge, part.num_layers - 1) for edge in part.leaving(part.prefix + ENTRY)]
        edges += [(*edge, 1) for edge in part.leaving(entry)]
    found = _counted_edges(operators, [*edges, ("final_norm", "head", 0, 1)])
    head = len(operators) - 2
    logits = operators[-1].inputs[0]
    found += (TensorEdge(head, operators[head].output, head + 1, logits, unpadded=shape.vocab),)
    if shape.tied:
        weight = operators[head].inputs[1]
        weight = replace(weight, dims=weight.dims[::-1])
        found += (TensorEdge(0, first.inputs[0], head, weight),)
    return OperatorGraph(operators, found)


@dataclass(frozen=True)
class _Layers:
    """Consecutive layers that share one choice."""

    block: Block
    start: int
    num_layers: int
    is_all: bool
    """Whether they are the model's only ones, so that their names do not say which they are."""

    @property
    def prefix(self) -> str:
        """Of the names of their operators."""
        if self.is_all:
            return ""
        last = self.start + self.num_layers - 1
        return f"blocks.{self.start}{f'-{last}' if last > self.start else ''}."

    @property
    def operators(self) -> tuple[Operator, ...]:
        """Each of which stands for all of these layers."""
        return tuple(
            replace(
                op,
                name=self.prefix + op.name,
                num_layers=self.num_layers,
                modules=op.modules if self.is_all else tuple(self._modules(op)),
            )
            for op in self.block.operators
        )

    def _modules(self, operator: Operator) -> Iterator[str]:
        for layer in range(self.start, self.start + self.num_layers):
            yield from (module.replace("*", str(layer)) for module in operator.modules)

    @property
    def inside(self) -> Iterator[tuple[str, str, int]]:
        """What passes within a layer."""
        for source, target, place in self.block.edges:
            yield self.prefix + source, self.prefix + target, place

    def leaving(self, entry: str) -> Iterator[tuple[str, str, int]]:
        """What passes from a layer to the norm `entry`."""
        for name, place in self.block.exits:
            yield self.prefix + name, entry, place


def _parts(
    shape: Shape, sequences: int, length: int, fused: bool, runs: Sequence[int]
) -> Iterator[_Layers]:
    """Runs of layers, divided where layers with experts begin."""
    dense = shape.first_dense
    bounds = {0, dense, shape.layers, *(sum(runs[:count]) for count in range(1, len(runs)))}
    blocks: dict[bool, Block] = {}
    for start, stop in pairwise(sorted(bounds)):
        kind = start >= dense
        if kind not in blocks:
            blocks[kind] = block_operators(shape, sequences, length, fused, kind)
        yield _Layers(blocks[kind], start, stop - start, stop - start == shape.layers)


def _edges(
    operators: Sequence[Operator], pairs: Iterable[tuple[str, str, int]]
) -> tuple[TensorEdge, ...]:
    return _counted_edges(operators, [(*pair, 1) for pair in pairs])


def _counted_edges(
    operators: Sequence[Operator], edges: Iterable[tuple[str, str, int, int]]
) -> tuple[TensorEdge, ...]:
    """Edges of (from, to, which input, layers that have it)."""
    at = {op.name: i for i, op in enumerate(operators)}
    return tuple(
        TensorEdge(
            at[a],
            _by_tokens(operators[at[a]].output),
            at[b],
            _by_tokens(operators[at[b]].inputs[place]),
            count,
        )
        for a, b, place, count in edges
        if count
    )


def _by_tokens(tensor: OperatorTensor) -> OperatorTensor:
    """A tensor of attention with its tokens second, as those of its neighbors have them."""
    tokens = [name for name in tensor.dims if name in ("query", "key")]
    if len(tokens) != 1:
        return tensor
    others = [name for name in tensor.dims if name not in ("rows", *tokens)]
    return replace(tensor, dims=("rows", *tokens, *others))
