"""A plan's operator strategies as the cost model reads them, and the parameters that a rank holds
under them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from workbench.plan.model.model_shape import Moe, Shape
from workbench.plan.operators.least_redistribution import LeastRedistribution
from workbench.plan.operators.operator_sites import OUTPUT, POSITIONS
from workbench.plan.operators.redistribution_moves import neighbors
from workbench.plan.operators.strategy_form import Placement
from workbench.plan.operators.tensor_layout import TensorLayout

Choices = frozenset[tuple[str, Placement | None]]
"""(module, strategy) of modules, and (module, None) of those recomputed."""
LayerKind = tuple[bool, Choices]
"""(whether a layer has experts, choices of its modules)."""


@dataclass(frozen=True)
class RankGrid:
    """The grid that tensor ranks are to operators that are sharded each in its own way."""

    sides: tuple[int, ...]
    """Outermost first."""

    def ranks_over(self, axes: tuple[int, ...]) -> int:
        """Ranks of a group that spans these axes."""
        return math.prod(self.sides[axis] for axis in axes)

    def group(self, axes: tuple[int, ...]) -> tuple[int, int]:
        """(ranks of the group that spans a run of neighboring axes, distance between them among the
        ranks of the grid).
        """
        return self.ranks_over(axes), math.prod(self.sides[axes[-1] + 1 :])

    def groups(self) -> Iterator[tuple[int, ...]]:
        """Axes of every group that collectives may span."""
        yield from neighbors(range(len(self.sides)))


@dataclass(frozen=True)
class OperatorStrategies(RankGrid):
    """Which dimension of each named module each axis of the grid shards."""

    placements: Mapping[str, Placement]
    """Module, or module + `OUTPUT` -> the dimension that each axis shards."""
    least: LeastRedistribution
    """Chooses the steps of each redistribution, as the runtime does."""
    recomputed: frozenset[str] = frozenset()
    """Modules that keep their inputs alone, and run again in backward."""
    boundary: tuple[int, ...] = ()
    """Axes over which what passes between pipeline stages is split by tokens."""
    expert_ranks: int = 1
    """Ranks over which the experts of a layer are spread."""
    passes: dict[Hashable, Any] = field(default_factory=dict, compare=False, repr=False)
    """What ran for a stage, by what it depends on. Plans of one model on one mesh may share it."""

    @property
    def boundary_layout(self) -> TensorLayout:
        """How what passes between stages lies, [B, T, D]."""
        return TensorLayout(((), self.boundary, ()))

    @cached_property
    def parameters(self) -> dict[Hashable, tuple[OperatorParameter, ...]]:
        """Of each stage, once they were asked for."""
        return {}

    def kind_of(self, shape: Shape, layer: int) -> LayerKind:
        """What a layer costs depends on."""
        has_experts = shape.moe is not None and layer >= shape.moe.first_dense
        return has_experts, self.kinds.get(f"blocks.{layer}", frozenset())

    @cached_property
    def kinds(self) -> Mapping[str, Choices]:
        """Layer (`blocks.3`), or "" for the model's ends -> choices of its modules."""
        found: defaultdict[str, set[tuple[str, Placement | None]]] = defaultdict(set)
        for path, placement in (*self.placements.items(), *((p, None) for p in self.recomputed)):
            parts = path.split(".")
            layer = ".".join(parts[:2]) if parts[0] == "blocks" else ""
            found[layer].add((".".join(parts[2:]) if layer else path, placement))
        return {name: frozenset(own) for name, own in found.items()}

    def axes(self, module: str, dimension: str) -> tuple[int, ...]:
        """Axes that shard a dimension of a module."""
        own = self.placements.get(module, ())
        return tuple(axis for axis, name in enumerate(own) if name == dimension)

    def token_axes(self, module: str, added: bool = False) -> tuple[int, ...]:
        """Axes that shard the rows or tokens of a module; where it is `added` to its output, of
        that.
        """
        own = self.placements.get(module, ())
        own = self.placements.get(module + OUTPUT, own) if added else own
        return tuple(axis for axis, name in enumerate(own) if name in ("rows", "tokens"))

    def local(self, size: int, module: str, dimension: str) -> int:
        """Entries of a rank's shard of a dimension, padding included."""
        return -(-size // self.ranks_over(self.axes(module, dimension)))


def group_name(axes: tuple[int, ...]) -> str:
    """Name of the link that the group over these axes of the grid sees."""
    return f"operators.{'.'.join(map(str, axes))}"


@dataclass(frozen=True)
class OperatorParameter:
    """One parameter of a stage on this rank."""

    name: str
    """In the model, e.g. blocks.0.attention.q.weight."""
    shape: tuple[int, ...]
    partial_over: tuple[int, ...]
    """Axes of the grid over which its gradient is a partial sum: those that shard rows or tokens,
    and of an MoE layer's unsharded parameters its width.
    """

    @property
    def elements(self) -> int:
        """Entries, padding included."""
        return math.prod(self.shape)

    @property
    def is_of_experts(self) -> bool:
        """Whether it belongs to routed experts, which are spread over ranks."""
        return ".experts." in self.name

    @property
    def unit(self) -> str:
        """The ZeRO-3 unit that it belongs to."""
        first, second, *_ = self.name.split(".")
        return {"blocks": second, "embedding": first}.get(first, "head")


def stage_parameters(
    s: OperatorStrategies, shape: Shape, layers: Iterable[int], has_embedding: bool, has_head: bool
) -> Iterator[OperatorParameter]:
    """Parameters of a stage in the model's order; of a tied weight the head has one too."""
    if has_embedding:
        yield _matrix(s, "embedding.tokens", (shape.vocab, "vocabulary"), (shape.hidden, "hidden"))
        if shape.positions == "learned":
            positions = (shape.max_positions, shape.hidden)
            yield OperatorParameter(f"{POSITIONS}.weight", positions, s.token_axes(POSITIONS))
        if shape.embedding_norm:
            yield from _norm(s, shape, "embedding.norm")
    alike: dict[LayerKind, list[OperatorParameter]] = {}
    for layer in layers:
        own = alike.setdefault(s.kind_of(shape, layer), [])
        if not own:
            own += _block(s, shape, layer)
        yield from (replace(p, name=f"blocks.{layer}.{p.name.split('.', 2)[2]}") for p in own)
    if has_head:
        yield from _norm(s, shape, "final_norm")
        yield _matrix(s, "head", (shape.vocab, "columns"), (shape.hidden, "inner"))


def _block(s: OperatorStrategies, shape: Shape, layer: int) -> Iterator[OperatorParameter]:
    block = f"blocks.{layer}"
    some, every = shape.biases in ("qkv", "all"), shape.biases == "all"
    h, keys = shape.hidden, shape.kv_width
    yield from _norm(s, shape, f"{block}.attention_norm")
    for name, width in (("q", shape.q_width), ("k", keys), ("v", keys)):
        yield from _linear(s, f"{block}.attention.{name}", width, h, some)
    yield from _linear(s, f"{block}.attention.o", h, shape.q_width, every)
    yield from _norm(s, shape, f"{block}.mlp_norm")
    if shape.moe is not None and layer >= shape.moe.first_dense:
        yield from _experts(s, shape, shape.moe, f"{block}.mlp")
        return
    for name in ("gate", "up") if shape.gated else ("up",):
        yield from _linear(s, f"{block}.mlp.{name}", shape.ffn, h, every)
    yield from _linear(s, f"{block}.mlp.down", h, shape.ffn, every)


def _experts(
    s: OperatorStrategies, shape: Shape, moe: Moe, path: str
) -> Iterator[OperatorParameter]:
    """Router, routed experts and shared ones, whose width alone is sharded."""
    rows, h = s.axes(path, "rows"), shape.hidden
    both = tuple(sorted((*rows, *s.axes(path, "width"))))
    yield OperatorParameter(f"{path}.route.weight", (moe.experts, h), both)
    stacked: tuple[int, ...] = (moe.experts // s.expert_ranks,)
    groups = [("experts", stacked, moe.ffn)]
    if moe.shared:
        groups.append(("shared", (), moe.shared * moe.ffn))
    for group, stacked, whole in groups:
        width = s.local(whole, path, "width")
        into = [(name, (width, h)) for name in (("gate", "up") if shape.gated else ("up",))]
        for name, own in [*into, ("down", (h, width))]:
            key, over = f"{path}.{group}.{name}", both if name == "down" else rows
            yield OperatorParameter(f"{key}.weight", (*stacked, *own), rows)
            if shape.biases == "all":
                yield OperatorParameter(f"{key}.bias", (*stacked, own[0]), over)


def _linear(
    s: OperatorStrategies, module: str, columns: int, inner: int, bias: bool
) -> Iterator[OperatorParameter]:
    yield _matrix(s, module, (columns, "columns"), (inner, "inner"))
    if bias:
        width = s.local(columns, module, "columns")
        yield OperatorParameter(f"{module}.bias", (width,), s.token_axes(module, added=True))


def _matrix(s: OperatorStrategies, module: str, *dims: tuple[int, str]) -> OperatorParameter:
    shape = tuple(s.local(size, module, name) for size, name in dims)
    return OperatorParameter(f"{module}.weight", shape, s.token_axes(module))


def _norm(s: OperatorStrategies, shape: Shape, module: str) -> Iterator[OperatorParameter]:
    for name in ("weight", "bias") if shape.norm == "layernorm" else ("weight",):
        yield OperatorParameter(f"{module}.{name}", (shape.hidden,), s.token_axes(module))
