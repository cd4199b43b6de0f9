"""Modules with and without a strategy on shapes, as `parallel/operators/operator_forward.py` runs
them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from workbench.costmodel.operators.layers.symbolic_float8 import float8_linear
from workbench.costmodel.operators.symbolic_autograd import Gradients, SymbolicTensor
from workbench.costmodel.operators.symbolic_functions import contiguous, linear, view
from workbench.costmodel.operators.symbolic_rank import SymbolicRank
from workbench.costmodel.operators.symbolic_sharding import ShapeSharding, SharedShapes, replicated
from workbench.plan.operators.operator_sites import OUTPUT
from workbench.plan.operators.strategy_form import Placement

Tensors = tuple[SymbolicTensor, ...]
LocalFn = Callable[..., SymbolicTensor | tuple[SymbolicTensor, ...]]
TOKEN_DIMS = {"rows": 0, "tokens": 1}
"""Dims of sequences and of their tokens in every activation."""
LOCAL_DIMS = TOKEN_DIMS | {"width": -1, "heads": 2}
"""Dimensions of activations -> their dim, for modules that compute shards independently."""


@dataclass(frozen=True)
class SymbolicStrategies:
    """Which modules of a stage have a strategy."""

    r: SymbolicRank
    placements: dict[str, Placement]
    shared: dict[str, SharedShapes]
    """Parent module -> the inputs that its children share."""

    def of(self, path: str) -> ShapeSharding | None:
        """The strategy of a module; None where the plan names none."""
        if path not in self.placements:
            return None
        own, output = self.placements[path], self.placements.get(path + OUTPUT)
        return ShapeSharding(self.r, own, self.shared_by(path), output)

    def replicate(self, path: str) -> ShapeSharding:
        """The strategy of a module that computes the same on every rank."""
        return ShapeSharding(self.r, (None,) * len(self.r.sides), self.shared_by(path))

    def shared_by(self, path: str) -> SharedShapes:
        """The inputs that a module's parent has redistributed."""
        return self.shared.setdefault(path.rpartition(".")[0], SharedShapes())

    def left(self, parent: str) -> None:
        """A parent's forward is over."""
        if parent in self.shared:
            self.shared.pop(parent).clear()

    def linear(
        self, path: str, x: SymbolicTensor, weight: SymbolicTensor, bias: SymbolicTensor | None
    ) -> SymbolicTensor:
        """A linear layer; its parameters are this rank's shards."""
        sharding, product = self.of(path) or self.replicate(path), partial(linear, self.r, path)
        local = sharding.to_local(x, **TOKEN_DIMS, inner=-1)
        again = sharding.gathered(local)
        if self.r.w.quantized_format is not None:
            y = float8_linear(self.r, path, sharding.placement, local, weight)
            y = sharding.reduce_partial(y, **TOKEN_DIMS, columns=-1)
            y = y if bias is None else add_bias(self.r, y, bias)
            return sharding.to_global(y, **TOKEN_DIMS, columns=-1)
        if "inner" not in sharding.placement:
            y = product(local, weight, bias, again)
            return sharding.to_global(y, **TOKEN_DIMS, columns=-1)
        y = sharding.reduce_partial(product(local, weight, None, again), **TOKEN_DIMS, columns=-1)
        y = y if bias is None else add_bias(self.r, y, bias)
        return sharding.to_global(y, **TOKEN_DIMS, columns=-1)

    def norm(self, path: str, forward: LocalFn, *inputs: SymbolicTensor | None) -> Tensors:
        """A norm, by rows and tokens; without a strategy on replicated inputs."""
        sharding = self.of(path)
        if sharding is None:
            made = forward(*(x if x is None else replicated(self.r, x) for x in inputs))
            assert isinstance(made, tuple)
            return made
        return run_local(sharding, forward, TOKEN_DIMS, *inputs)

    def local(
        self, path: str, forward: LocalFn, dims: tuple[int, ...] | None, *inputs: SymbolicTensor
    ) -> Tensors:
        """A module that computes shards independently: by its strategy, or as its first shard among
        the inputs is sharded, where that is along `dims` (None: any).
        """
        sharding = self.of(path)
        if sharding is not None:
            return run_local(sharding, forward, LOCAL_DIMS, *inputs)
        first = next((x for x in inputs if x.layout is not None), None)
        if first is None or first.layout is None:
            return _tuple(forward(*inputs))
        names = tuple(
            str(dim) if dim is not None and (dims is None or dim in dims) else None
            for dim in first.layout.at(len(self.r.sides))
        )
        if not any(names):
            return _tuple(forward(*(replicated(self.r, x) for x in inputs)))
        follow = ShapeSharding(self.r, names, SharedShapes())
        return run_local(follow, forward, {n: int(n) for n in names if n is not None}, *inputs)


def run_local(
    sharding: ShapeSharding, forward: LocalFn, dims: dict[str, int], *inputs: SymbolicTensor | None
) -> Tensors:
    """Run a module on this rank's shards."""
    local = [None if x is None else sharding.to_local(x, **dims) for x in inputs]
    return tuple(sharding.to_global(y, **dims) for y in _tuple(forward(*local)))


def _tuple(made: SymbolicTensor | Tensors) -> Tensors:
    return made if isinstance(made, tuple) else (made,)


def add_bias(r: SymbolicRank, y: SymbolicTensor, bias: SymbolicTensor) -> SymbolicTensor:
    """A bias added apart from its GEMM."""
    total = r.like(y)
    r.compute("bias", y.numel, 1)

    def backward(gradient: SymbolicTensor) -> Gradients:
        return gradient, r.like(bias)

    return r.made(total, backward, y, bias)


def heads(r: SymbolicRank, x: SymbolicTensor, head_dim: int) -> SymbolicTensor:
    """[B, T, heads x head_dim] as [B, T, heads, head_dim]."""
    return view(r, x, (*x.shape[:-1], x.shape[-1] // head_dim, head_dim))


def flattened(r: SymbolicRank, x: SymbolicTensor) -> SymbolicTensor:
    """[B, T, heads, head_dim] as [B, T, heads x head_dim]; a copy where memory is not in order."""
    return view(r, contiguous(r, x), (*x.shape[:-2], x.shape[-2] * x.shape[-1]))
