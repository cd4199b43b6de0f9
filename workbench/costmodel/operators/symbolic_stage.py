"""A pipeline stage of our transformer on shapes (`models/transformer.py`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from workbench.costmodel.inputs.operator_strategies import OperatorStrategies, stage_parameters
from workbench.costmodel.memory.activation_memory import TOKEN_ID_BYTES
from workbench.costmodel.operators.symbolic_attention import attend, rope
from workbench.costmodel.operators.symbolic_autograd import SymbolicTensor
from workbench.costmodel.operators.symbolic_checkpoint import checkpointed
from workbench.costmodel.operators.symbolic_ends import add_positions, embed, head_loss, lookup
from workbench.costmodel.operators.symbolic_functions import activate
from workbench.costmodel.operators.symbolic_modules import (
    LocalFn,
    SymbolicStrategies,
    flattened,
    heads,
)
from workbench.costmodel.operators.symbolic_norms import add_norm
from workbench.costmodel.operators.symbolic_rank import SymbolicRank
from workbench.costmodel.operators.symbolic_sharding import local_part, redistribute, sharded_sum

ShapesFn = Callable[..., tuple[SymbolicTensor, ...]]
HEAD_DIMS = (0, 2)
"""Dims of [B, T, heads, head_dim] along which attention may be sharded."""
ROPE_DIMS = (0, 1, 2)
"""Those along which rotary positions may be."""


@dataclass(frozen=True)
class Layers:
    """Layers of a stage that run; of several alike in a row one stands for many."""

    runs: tuple[tuple[int, int], ...]
    """(layer, how many layers it stands for)."""
    has_embedding: bool
    has_head: bool


class SymbolicStage:
    """A stage whose parameters are this rank's shards."""

    def __init__(self, r: SymbolicRank, named: OperatorStrategies, layers: Layers) -> None:
        self.r, self.layers = r, layers
        self.s = SymbolicStrategies(r, dict(named.placements), {})
        self.recomputed, self.boundary = frozenset(named.recomputed), named.boundary_layout
        self.parameters: dict[str, SymbolicTensor] = {}
        numbers = [layer for layer, _ in layers.runs]
        shape, ends = r.w.shape, (layers.has_embedding, layers.has_head)
        for p in stage_parameters(named, shape, numbers, *ends):
            r.enter(part_of(p.name))
            self.parameters[p.name] = r.parameter(*p.shape)
        if shape.tied and all(ends):
            self.parameters["head.weight"] = self.parameters["embedding.tokens.weight"]

    def forward(self, x: SymbolicTensor, targets: SymbolicTensor) -> SymbolicTensor:
        """The loss, or the stage's output."""
        r = self.r
        r.enter("embedding")
        tables = self._positions()
        residual: SymbolicTensor | None = None
        if self.layers.has_embedding:
            x = self._embedding(x)
        for layer, times in self.layers.runs:
            r.enter(f"layer.{layer}")
            before, r.repeats[f"layer.{layer}"] = r.tape.total, times
            x, residual = self._block(layer, x, residual, tables)
            if times > 1:  # the others keep as much
                x = r.beside(x, (times - 1) * (r.tape.total - before))
        r.enter("head" if self.layers.has_head else "output")
        if not self.layers.has_head:
            total = x if residual is None else sharded_sum(r, x, residual)
            local, held = local_part(r, total)
            return redistribute(r, local, held, self.boundary)
        x, _ = self._norm("final_norm", x, residual)
        del residual
        with r.tape.category("logits"):
            loss = head_loss(self.s, x, targets, self.parameters["head.weight"])
        self.s.left("")
        return loss

    def _positions(self) -> SymbolicTensor:
        """Rotary tables, as one tensor."""
        shape, length = self.r.w.shape, self.r.w.fixed.sequence_length
        wide = shape.head_dim if shape.positions == "rope" else 0
        return self.r.empty((length, int(wide or 0)))

    def _embedding(self, tokens: SymbolicTensor) -> SymbolicTensor:
        r, shape = self.r, self.r.w.shape
        x = embed(self.s, tokens, self.parameters["embedding.tokens.weight"])
        if shape.positions == "learned":
            indices = r.empty(tokens.shape[1:], TOKEN_ID_BYTES)
            table = self.parameters["embedding.positions.weight"]
            x = add_positions(r, x, lookup(r, indices, table, False))
        if shape.embedding_norm:
            x, _ = self._norm("embedding.norm", x, None)
        self.s.left("embedding")
        return x

    def _block(
        self, layer: int, x: SymbolicTensor, residual: SymbolicTensor | None, tables: SymbolicTensor
    ) -> tuple[SymbolicTensor, SymbolicTensor]:
        block = f"blocks.{layer}"
        forward = partial(self._block_forward, block, tables)
        if block in self.recomputed:
            total = x if residual is None else sharded_sum(self.r, x, residual)
            branch, summed = checkpointed(self.r, forward, f"{block}.mlp.down", total)
        else:
            branch, summed = forward(x, residual)
        return branch, summed

    def _block_forward(
        self,
        block: str,
        tables: SymbolicTensor,
        x: SymbolicTensor,
        residual: SymbolicTensor | None = None,
    ) -> tuple[SymbolicTensor, ...]:
        h, summed = self._norm(f"{block}.attention_norm", x, residual)
        attention = partial(self._attention, f"{block}.attention", tables)
        path = f"{block}.attention"
        (branch,) = self._module(path, attention, f"{path}.o", h)
        h, summed = self._norm(f"{block}.mlp_norm", branch, summed)
        path = f"{block}.mlp"
        (branch,) = self._module(path, partial(self._mlp, path), f"{path}.down", h)
        self.s.left(block)
        return branch, summed

    def _module(
        self, path: str, forward: ShapesFn, last: str, *inputs: SymbolicTensor
    ) -> tuple[SymbolicTensor, ...]:
        """Run a module, recomputed in backward where the plan names it; `last` is its last operator
        that saves a tensor.
        """
        if path not in self.recomputed:
            return forward(*inputs)
        return checkpointed(self.r, forward, last, *inputs)

    def _attention(
        self, path: str, tables: SymbolicTensor, x: SymbolicTensor
    ) -> tuple[SymbolicTensor, ...]:
        head = int(self.r.w.shape.head_dim or 0)
        q, k, v = (heads(self.r, self._linear(f"{path}.{name}", x), head) for name in "qkv")
        q, k = self.s.local(f"{path}.rope", self._rope(tables), ROPE_DIMS, q, k)
        core = self._local(f"{path}.attend", attend, "")
        (attended,) = self.s.local(f"{path}.attend", core, HEAD_DIMS, q, k, v)
        output = self._linear(f"{path}.o", flattened(self.r, attended))
        self.s.left(path)
        return (output,)

    def _local(
        self, path: str, function: Callable[..., SymbolicTensor], last: str
    ) -> Callable[..., tuple[SymbolicTensor, ...]]:
        """What a module computes on this rank's shards, which is all that is recomputed of it."""

        def forward(*inputs: SymbolicTensor) -> tuple[SymbolicTensor, ...]:
            return (function(self.r, *inputs),)

        return partial(self._module, path, forward, last)

    def _rope(self, tables: SymbolicTensor) -> LocalFn:
        if self.r.w.shape.positions != "rope":
            return lambda q, k: (q, k)
        return partial(rope, self.r, tables)

    def _mlp(self, path: str, x: SymbolicTensor) -> tuple[SymbolicTensor, ...]:
        up, is_gated = self._linear(f"{path}.up", x), self.r.w.shape.gated
        core = self._local(f"{path}.activate", activate, "activate")
        run = partial(self.s.local, f"{path}.activate", core, None)
        # The gate is let go of once it is activated.
        (activated,) = run(self._linear(f"{path}.gate", x), up) if is_gated else run(up)
        output = self._linear(f"{path}.down", activated)
        self.s.left(path)
        return (output,)

    def _linear(self, path: str, x: SymbolicTensor) -> SymbolicTensor:
        weight, bias = self.parameters[f"{path}.weight"], self.parameters.get(f"{path}.bias")
        return self.s.linear(path, x, weight, bias)

    def _norm(
        self, path: str, x: SymbolicTensor, residual: SymbolicTensor | None
    ) -> tuple[SymbolicTensor, SymbolicTensor]:
        own = [f"{path}.weight", f"{path}.bias"]
        parameters = tuple(self.parameters[name] for name in own if name in self.parameters)
        forward = partial(add_norm, self.r, parameters)
        y, total = self.s.norm(path, forward, x, residual)
        return y, total


def part_of(parameter: str) -> str:
    """The part of a stage that a parameter belongs to."""
    first, second, *_ = parameter.split(".")
    return {"blocks": f"layer.{second}", "embedding": first}.get(first, "head")
