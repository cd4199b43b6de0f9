"""Redistribution of shapes between layouts by factors, forward and backward, as
`parallel/operators/factor_redistribution.py` does it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from workbench.costmodel.inputs.traced_stages import DTYPE_NAMES, TracedStages
from workbench.costmodel.operators.redistribution_shapes import redistributed
from workbench.costmodel.operators.symbolic_autograd import Gradients, SymbolicTensor
from workbench.costmodel.operators.symbolic_rank import SymbolicRank
from workbench.costmodel.traced.tensor_views import as_complex, as_real, narrowed, reshaped
from workbench.plan.operators.tensor_layout import TensorLayout
from workbench.plan.operators.traced.graph_placement import FactorLayout
from workbench.plan.operators.traced.traced_graph import TensorRef

PARTS = {"complex64": "fp32", "complex128": "fp64"}
"""Complex numbers -> their parts, which collectives take."""
NONE: frozenset[int] = frozenset()


class Spread(NamedTuple):
    """How a tensor lies on the grid: its layout, and the axes over which it is a partial sum."""

    layout: FactorLayout
    partial: frozenset[int] = NONE


Ways = tuple[Spread, Spread, Spread, Spread]
"""From and to in forward; from and to of the gradient in backward."""


def moved(
    r: SymbolicRank,
    traced: TracedStages,
    ref: TensorRef,
    x: SymbolicTensor,
    known: SymbolicTensor | None,
    ways: Ways,
) -> SymbolicTensor:
    """`x` in another layout, differentiably; `known` is the result, where there is one already."""
    if ways[0] == ways[1] and ways[2] == ways[3]:
        return x
    if known is None:
        known = _redistributed(r, traced, ref, x.detached(), ways[0], ways[1])

    def backward(gradient: SymbolicTensor) -> Gradients:
        return (_redistributed(r, traced, ref, gradient, ways[2], ways[3]),)

    return r.made(known, backward, x)


def _redistributed(
    r: SymbolicRank,
    traced: TracedStages,
    ref: TensorRef,
    x: SymbolicTensor,
    source: Spread,
    target: Spread,
) -> SymbolicTensor:
    if source == target or not traced.sides:
        return x
    factors = traced.factored.tensors[ref]
    name, size = DTYPE_NAMES[traced.types[ref].dtype]
    dtype = name if x.element_bytes == size else "fp32"  # a loss of 16-bit logits
    local = reshaped(r, x, factors.local_sizes(source.layout, traced.sides))
    if name in PARTS:
        local, dtype = as_real(r, local), PARTS[name]
    held, wanted = (
        TensorLayout.placed(way.layout, len(local.shape), sorted(way.partial))
        for way in (source, target)
    )
    local = replace(redistributed(r, local, held, wanted, dtype), node=None)
    if name in PARTS:
        local = as_complex(r, local)
    return reshaped(r, local, factors.local_shape(target.layout, traced.sides))


def own_part(
    r: SymbolicRank, traced: TracedStages, ref: TensorRef, x: SymbolicTensor, own: FactorLayout
) -> SymbolicTensor:
    """A view of the part of a parameter that lies as `own`."""
    factors, held = traced.factored.tensors[ref], traced.stored[ref.source].layout
    sizes = factors.local_sizes(held, traced.sides)
    x = reshaped(r, x, sizes)
    for factor, size in enumerate(factors.local_sizes(own, traced.sides)):
        if size != sizes[factor]:
            x = narrowed(r, x, factor, size)
    return reshaped(r, x, factors.local_shape(own, traced.sides))
