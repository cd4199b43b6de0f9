"""Embedding and loss of traced modules on shapes."""

from __future__ import annotations

import math

from workbench.costmodel.operators.symbolic_autograd import Gradients, SymbolicTensor
from workbench.costmodel.operators.symbolic_ends import clone, lookup, split_loss
from workbench.costmodel.operators.symbolic_rank import SymbolicRank
from workbench.costmodel.traced.entries.reductions import softmax
from workbench.costmodel.traced.node_call import NodeCall
from workbench.costmodel.traced.tensor_views import cast, reshaped


def embedding_entry(c: NodeCall) -> list[SymbolicTensor]:
    """Rows of a table; its gradient is dense."""
    table, tokens = c.inputs
    return [lookup(c.r, tokens, table, False)]


def cross_entropy(
    r: SymbolicRank, logits: SymbolicTensor, targets: SymbolicTensor
) -> SymbolicTensor:
    """Summed over [N, V]: log-softmax and the negative likelihood."""
    logarithms = softmax(r, logits, logits.element_bytes)
    saved, kept = logarithms.detached(), targets.detached()
    total, weight = (r.empty((), logits.element_bytes) for _ in range(2))

    def backward(gradient: SymbolicTensor) -> Gradients:
        assert kept is not None and weight is not None
        return (r.like(saved),)

    return r.made(total, backward, logarithms)


def own_loss_entry(c: NodeCall) -> list[SymbolicTensor]:
    """A module's own `cross_entropy`."""
    logits, targets, *weight = c.inputs
    if len(logits.shape) != 2 or weight or c.argument(5, "label_smoothing", 0.0):
        c.refused("of other than [N, V], or weighted or smoothed")
    return [cross_entropy(c.r, logits, targets)]


def loss(
    r: SymbolicRank, logits: SymbolicTensor, targets: SymbolicTensor, axes: tuple[int, ...]
) -> SymbolicTensor:
    """The loss that is added to logits, sharded by vocabulary over some axes of the grid."""
    rows = math.prod(logits.shape[:-1])
    flat = reshaped(r, logits, (rows, logits.shape[-1]))
    targets = reshaped(r, targets, (rows,))
    if axes:
        return split_loss(r, clone(r, flat), targets, axes)
    if flat.element_bytes < 4:
        flat = cast(r, flat, 4)
    return cross_entropy(r, flat, targets)
