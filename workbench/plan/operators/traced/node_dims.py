"""Dimensions of one operator by labels: what a rule says of each dim of each of its tensors."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from workbench.plan.operators.traced.traced_graph import TracedNode

Dim = tuple[tuple[str, int], ...]
"""A tensor's dim as a product of labelled dimensions (label, size), the outermost first."""
Dims = tuple[Dim, ...]
"""Each dim of a tensor."""


@dataclass(frozen=True)
class NodeDims:
    """Dimensions of an operator's tensors.

    A label names the same dimension in all tensors; a label of several dims of one tensor is their
    product. A dimension that the outputs lack is summed over: sharded, it leaves partial sums.

    Attributes:
        inputs: Of each tensor input.
        outputs: Of each result.
        fixed: Labels that cannot be sharded.
        added: Inputs that are added to the sum (a bias), by index.
    """

    inputs: tuple[Dims, ...]
    outputs: tuple[Dims, ...]
    fixed: frozenset[str] = frozenset()
    added: frozenset[int] = frozenset()

    def labels(self) -> list[str]:
        """All labels, those of the first inputs first."""
        tensors = (*self.inputs, *self.outputs)
        return list(dict.fromkeys(label for dims in tensors for dim in dims for label, _ in dim))


@dataclass(frozen=True)
class RuleInputs:
    """What a rule reads: a node, and the shapes of its tensors."""

    node: TracedNode
    shapes: tuple[tuple[int, ...], ...]

    @property
    def outputs(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the results."""
        return tuple(tensor.shape for tensor in self.node.outputs)

    def argument(self, index: int, name: str, default: object = None) -> object:
        """An argument by position or name."""
        args = self.node.args
        return args[index] if index < len(args) else self.node.kwargs.get(name, default)

    def dim(self, index: int, name: str = "dim", default: int = 0) -> int:
        """An argument that is a dim of the first tensor, from 0."""
        value = self.argument(index, name, default)
        assert isinstance(value, int)
        return value % max(1, len(self.shapes[0]))


def named(shape: tuple[int, ...], labels: str | Iterable[str]) -> Dims:
    """Dims with a label each; one of size 1 has none: it is the same for all of a larger dim."""
    each = labels.split() if isinstance(labels, str) else list(labels)
    assert len(each) == len(shape), (shape, each)
    return tuple(((label, size),) if size > 1 else () for label, size in zip(each, shape))


def aligned(shape: tuple[int, ...], ndim: int) -> Dims:
    """Dims of a tensor that broadcasts to `ndim` dims: `dim0`, `dim1`, .. from the first of
    those.
    """
    return named(shape, (f"dim{ndim - len(shape) + i}" for i in range(len(shape))))


def replicated(x: RuleInputs) -> NodeDims:
    """No dim can be sharded: what an operator without a rule gets."""
    tensors = (*x.shapes, *x.outputs)
    dims = [named(s, (f"t{i}d{j}" for j in range(len(s)))) for i, s in enumerate(tensors)]
    fixed = frozenset(label for each in dims for dim in each for label, _ in dim)
    return NodeDims(tuple(dims[: len(x.shapes)]), tuple(dims[len(x.shapes) :]), fixed)
