"""Activation checkpointing on shapes: a module keeps its inputs alone, and runs again in backward
(`parallel/activation_checkpointing.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from workbench.costmodel.operators.symbolic_autograd import (
    Gradients,
    SymbolicTensor,
    leaf,
    run_backward,
)
from workbench.costmodel.operators.symbolic_rank import SymbolicRank

Tensors = tuple[SymbolicTensor, ...]


def checkpointed(
    r: SymbolicRank, forward: Callable[..., Tensors], last_saving: str, *inputs: SymbolicTensor
) -> Tensors:
    """Run a module that keeps its inputs alone.

    Args:
        r: The rank.
        forward: The module's.
        last_saving: Its last operator that saves a tensor, where recomputation stops; empty where
            that operator has computed by then.
        inputs: What it keeps.
    """
    made_once: list[SymbolicTensor] = []
    before = r.records, r.made_once
    r.records, r.made_once, r.recomputes = False, made_once, True
    outputs = forward(*(x.detached() for x in inputs))
    (r.records, r.made_once), r.recomputes = before, False

    def backward(gradients: list[SymbolicTensor | None]) -> Gradients:
        r.repeated = made_once
        return _recomputed(r, forward, last_saving, inputs, gradients)

    node = r.node(backward, *inputs, outputs=len(outputs), takes_list=True)
    return tuple(replace(y, node=node, output=at) for at, y in enumerate(outputs))


def _recomputed(
    r: SymbolicRank,
    forward: Callable[..., Tensors],
    last_saving: str,
    inputs: Tensors,
    gradients: list[SymbolicTensor | None],
) -> Gradients:
    found: list[SymbolicTensor | None] = [None] * len(inputs)
    own = [
        replace(x, node=None if x.node is None else leaf(partial(_keep, found, at), r.tape.part))
        for at, x in enumerate(inputs)
    ]
    r.last_saving, r.recomputes = last_saving, True
    outputs = forward(*own)
    r.last_saving, r.is_over, r.repeated, r.recomputes = "", False, None, False
    roots = [(y, gradient) for y, gradient in zip(outputs, gradients) if gradient is not None]
    del own, outputs
    gradients.clear()
    run_backward(r.tape, roots)
    return found


def _keep(found: list[SymbolicTensor | None], at: int, gradient: SymbolicTensor) -> None:
    found[at] = gradient


def kept_for_recomputation(r: SymbolicRank, make: Callable[[], SymbolicTensor]) -> SymbolicTensor:
    """As `models/host_counts.py`: what `make` returns, or in a recomputation what it returned in
    forward.
    """
    if r.repeated is not None:
        return r.repeated.pop(0)
    made = make()
    if r.made_once is not None:
        r.made_once.append(made)
    return made
