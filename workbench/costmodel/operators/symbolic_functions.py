"""The operators of a block on shapes: each allocates, saves and frees what the runtime's does
(`models/seams.py`, `kernels/`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from workbench.costmodel.memory.activation_memory import keeps_small_seams_eager, runs_fused_seam
from workbench.costmodel.operators.symbolic_autograd import Gradients, SymbolicTensor
from workbench.costmodel.operators.symbolic_rank import DeferredProduct, SymbolicRank
from workbench.runtime_facts.fused_thresholds import ATEN_SEAMS


@dataclass(eq=False)
class GatheredAgain:
    """An input of GEMMs that is gathered again in backward, once for all that read it
    (`parallel/operators/gathered_again.py`).
    """

    gather: Callable[[], SymbolicTensor]
    saves: int = 0
    _again: SymbolicTensor | None = None

    def saved(self) -> GatheredAgain:
        """What a reader saves."""
        self.saves += 1
        return self

    def taken(self) -> SymbolicTensor:
        """The input in backward."""
        again = self.gather() if self._again is None else self._again
        self.saves -= 1
        self._again = again if self.saves else None
        return again


def runs_fused(r: SymbolicRank, kind: str, numel: int) -> bool:
    """Whether the plan's kernels run a seam of so many elements fused."""
    if keeps_small_seams_eager(r.w) and kind in ATEN_SEAMS:
        return False
    return bool(runs_fused_seam(r.w, float(numel)))


def linear(
    r: SymbolicRank,
    path: str,
    x: SymbolicTensor,
    weight: SymbolicTensor,
    bias: SymbolicTensor | None,
    again: GatheredAgain | None = None,
) -> SymbolicTensor:
    """x W^T + bias; weight [columns, inner]. Backward reads `x`, or what `again` gathers."""
    rows, (columns, inner) = x.numel // x.shape[-1], weight.shape
    r.saved_by(path)
    y = r.empty((*x.shape[:-1], columns))
    r.compute("linear", rows, columns, inner)
    if bias is not None:
        r.compute("bias", rows * columns, 0)

    saved = x.detached() if again is None else again.saved()

    def backward(gradient: SymbolicTensor) -> Gradients:
        x = saved if isinstance(saved, SymbolicTensor) else saved.taken()
        if r.deferred is not None and r.tape.part != "loss":  # the head is never split
            r.deferred.products.append(DeferredProduct(x.detached(), gradient, weight, bias))
            return r.like(x), None, None
        if bias is None:
            weight_gradient = r.like(weight)
            return r.like(x), weight_gradient, None
        x_gradient, weight_gradient = r.like(x), r.like(weight)
        return x_gradient, weight_gradient, r.like(bias)

    return r.made(y, backward, x, weight, bias)


def add(r: SymbolicRank, x: SymbolicTensor, y: SymbolicTensor) -> SymbolicTensor:
    """x + y, of one shape and layout."""
    total = replace(x, storage=r.like(x).storage)

    def backward(gradient: SymbolicTensor) -> Gradients:
        return gradient, gradient

    return r.made(total, backward, x, y)


def contiguous(r: SymbolicRank, x: SymbolicTensor) -> SymbolicTensor:
    """`x`, or a copy of it whose dims lie in memory in their order."""
    if x.is_contiguous:
        return x

    def backward(gradient: SymbolicTensor) -> Gradients:
        return (gradient,)

    return r.made(replace(x, storage=r.like(x).storage, strides=None), backward, x)


def view(r: SymbolicRank, x: SymbolicTensor, shape: tuple[int, ...]) -> SymbolicTensor:
    """The same storage in another shape, whose last dims alone differ and are not sharded."""
    before = x.shape

    def backward(gradient: SymbolicTensor) -> Gradients:
        return (_in_shape(gradient, before),)

    return r.made(_in_shape(x, shape), backward, x)


def _in_shape(x: SymbolicTensor, shape: tuple[int, ...]) -> SymbolicTensor:
    layout = x.layout
    if layout is not None:
        dims = (*layout.dims, ())[: len(shape)]
        layout = layout._replace(dims=dims)
    return replace(x, shape=shape, layout=layout)


def activate(
    r: SymbolicRank, gate: SymbolicTensor, up: SymbolicTensor | None = None
) -> SymbolicTensor:
    """The activation, times `up` where it is gated."""
    kind = r.w.shape.mlp
    r.compute("activation", gate.numel, gate.shape[-1])
    if kind != "relu" and runs_fused(r, kind, gate.numel):

        def backward(gradient: SymbolicTensor) -> Gradients:
            return r.like(gate), None if up is None else r.like(up)

        return r.made(r.like(gate), backward, gate, up)
    if kind == "relu":
        return _relu(r, gate)
    if up is None:
        r.saved_by("activate")
        return _pointwise(r, gate)
    return _product(r, _pointwise(r, gate), up)


def _relu(r: SymbolicRank, x: SymbolicTensor) -> SymbolicTensor:
    """Backward reads the result."""
    y = r.like(x)

    def backward(gradient: SymbolicTensor) -> Gradients:
        return (r.like(y),)

    return r.made(y, backward, x)


def _pointwise(r: SymbolicRank, x: SymbolicTensor) -> SymbolicTensor:
    """Backward reads the input."""

    def backward(gradient: SymbolicTensor) -> Gradients:
        return (r.like(x),)

    return r.made(r.like(x), backward, x)


def _product(r: SymbolicRank, x: SymbolicTensor, y: SymbolicTensor) -> SymbolicTensor:
    r.saved_by("activate")

    def backward(gradient: SymbolicTensor) -> Gradients:
        return r.like(x), r.like(y)

    return r.made(r.like(x), backward, x, y)
