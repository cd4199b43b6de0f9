"""A traced module as pure data: its operators in the order in which they run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

LOSS = "loss"
"""Name and id of the operator that is added to a module which returns logits."""
LOSS_OP = "head_loss"
"""What it is."""

DEVICE = "device"
"""Stands in arguments for the device that the graph runs on."""


@dataclass(frozen=True)
class TensorRef:
    """A tensor: the result of a node, or an input of the graph.

    Attributes:
        source: Id of the node or the input.
        index: Which of the node's results.
    """

    source: str
    index: int = 0


@dataclass(frozen=True)
class TracedTensor:
    """Shape and dtype of a tensor, unsharded."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class TracedNode:
    """One operator of `torch.ops.aten`.

    Attributes:
        id: Unique in the graph.
        name: What strategies call it.
        op: Its name without the overload, e.g. `linear`.
        overload: E.g. `default`, `Tensor`.
        args: Tensors as `TensorRef`, lists as tuples, dtypes and devices as text.
        kwargs: The same by name.
        outputs: Its results.
        module: Path of the module that calls it.
        line: File and line of the user's code.
    """

    id: str
    name: str
    op: str
    overload: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: tuple[TracedTensor, ...]
    module: str = ""
    line: str = ""

    @property
    def inputs(self) -> tuple[TensorRef, ...]:
        """Tensors that it reads, in the order of its arguments."""
        return tuple(references((self.args, tuple(self.kwargs.values()))))


@dataclass(frozen=True)
class TracedGraph:
    """Operators of a module from tokens to the loss.

    Attributes:
        tokens: Id of the input tokens [B, T].
        targets: Id of the input targets [B, T]; None where only logits are computed.
        parameters: Id -> name of the parameter; tied ones have one id.
        buffers: Id -> name of the buffer.
        constants: Ids of tensors that the module's code makes of numbers.
        inputs: Id -> shape of all of these.
        nodes: Operators in the order in which they run.
        output: The loss, or the logits.
        larger: The graph of two sequences, or two tokens, where this one has a single one: what
            a dim of size 1 is shows there.
    """

    tokens: str
    targets: str | None
    parameters: Mapping[str, str]
    buffers: Mapping[str, str]
    constants: tuple[str, ...]
    inputs: Mapping[str, TracedTensor]
    nodes: tuple[TracedNode, ...]
    output: TensorRef
    larger: TracedGraph | None = None

    def tensors(self) -> dict[TensorRef, TracedTensor]:
        """Every tensor of the graph."""
        found = {TensorRef(name): tensor for name, tensor in self.inputs.items()}
        for node in self.nodes:
            found |= {TensorRef(node.id, i): tensor for i, tensor in enumerate(node.outputs)}
        return found


def references(value: Any) -> Iterator[TensorRef]:
    """All tensors in nested arguments."""
    if isinstance(value, TensorRef):
        yield value
    elif isinstance(value, tuple):
        for each in value:
            yield from references(each)


def drop_rate(node: TracedNode) -> float:
    """Share of elements that an operator sets to zero at random."""
    at = {"dropout": (1, "p"), "scaled_dot_product_attention": (4, "dropout_p")}.get(node.op)
    if at is None:
        return 0.0
    index, name = at
    return float(node.args[index] if index < len(node.args) else node.kwargs.get(name, 0.0))
