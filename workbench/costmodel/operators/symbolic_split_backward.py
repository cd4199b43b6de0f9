"""A backward that is split into input gradients (I) and weight gradients (W) on shapes
(`parallel/pipeline/zero_bubble.py`), and layers of which one stands for several.
"""

from __future__ import annotations

from dataclasses import dataclass

from workbench.costmodel.operators.symbolic_autograd import Gradients, SymbolicTensor
from workbench.costmodel.operators.symbolic_rank import DeferredWeights, SymbolicRank


def run_weight_gradients(r: SymbolicRank, deferred: DeferredWeights) -> None:
    """W: the deferred weight gradients in their order; a pair of operands is freed before the next
    is multiplied.
    """
    r.enter("weights")
    while deferred.products:
        x, gradient, weight, bias = deferred.products.pop(0)
        if not r.accumulates_in_place:
            r.accumulate(r.like(weight))
        if bias is not None:
            r.accumulate(r.like(bias))
        del x, gradient
    deferred.of_other_layers.clear()


@dataclass
class RepeatedLayer:
    """A layer that stands for `times` alike in a row, of which it is the one that runs backward
    last: what the others keep is freed before, and what they defer is there after.
    """

    r: SymbolicRank
    times: int
    before_forward: float = 0.0
    kept_by_each: float = 0.0
    before_backward: float = 0.0

    def entered(self, x: SymbolicTensor) -> SymbolicTensor:
        """The layer's input."""
        self.before_forward = self.r.tape.total

        def backward(gradient: SymbolicTensor) -> Gradients:
            if (deferred := self.r.deferred) is not None:
                each = self.r.tape.total - self.before_backward + self.kept_by_each
                storage = self.r.tape.allocate((self.times - 1) * each)
                deferred.of_other_layers.append(storage)
            return (gradient,)

        return self.r.made(x, backward, x)

    def left(self, x: SymbolicTensor) -> SymbolicTensor:
        """The layer's output, until whose gradient the others' activations are kept."""
        self.kept_by_each = self.r.tape.total - self.before_forward
        kept = self.r.tape.allocate((self.times - 1) * self.kept_by_each)

        def backward(gradient: SymbolicTensor) -> Gradients:
            self.before_backward = self.r.tape.total - (self.times - 1) * self.kept_by_each
            assert kept is not None
            return (gradient,)

        return self.r.made(x, backward, x)
