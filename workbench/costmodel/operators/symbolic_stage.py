"""A pipeline stage of our transformer on shapes (`models/transformer.py`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from workbench.costmodel.communication.gradient_buffers import operator_buffers
from workbench.costmodel.inputs.operator_strategies import OperatorStrategies, stage_parameters
from workbench.costmodel.memory.activation_memory import TOKEN_ID_BYTES
from workbench.costmodel.operators.layers.symbolic_dropout import ROW_BYTES, dropped
from workbench.costmodel.operators.layers.symbolic_moe import SymbolicMoe
from workbench.costmodel.operators.layers.symbolic_ring import ring_attend
from workbench.costmodel.operators.layers.symbolic_ulysses import ulysses_attend
from workbench.costmodel.operators.symbolic_attention import attend, rope
from workbench.costmodel.operators.symbolic_autograd import Gradients, SymbolicTensor
from workbench.costmodel.operators.symbolic_checkpoint import checkpointed
from workbench.costmodel.operators.symbolic_ends import (
    add_positions,
    embed,
    embed_positions,
    head_loss,
)
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
from workbench.costmodel.operators.symbolic_split_backward import RepeatedLayer
from workbench.plan.operators.operator_sites import POSITIONS

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
        self.rows: SymbolicTensor | None = None
        """Ids [B, T] of the tokens, for dropout."""
        numbers = [layer for layer, _ in layers.runs]
        shape, ends = r.w.shape, (layers.has_embedding, layers.has_head)
        for p in stage_parameters(named, shape, numbers, *ends):
            r.enter(part_of(p.name))
            self.parameters[p.name] = r.parameter(*p.shape, name=p.name)
        if shape.tied and all(ends):
            self.parameters["head.weight"] = self.parameters["embedding.tokens.weight"]
        r.buffers = operator_buffers(r.tape, r.w, self.parameters)

    def forward(self, x: SymbolicTensor, targets: SymbolicTensor) -> SymbolicTensor:
        """The loss, or the stage's output."""
        r = self.r
        r.enter("embedding")
        tables = self._positions()
        self.rows = r.empty(x.shape[:2], ROW_BYTES) if r.w.fixed.dropout else None
        residual: SymbolicTensor | None = None
        if self.layers.has_embedding:
            x = self._embedding(x)
        aux_losses: list[SymbolicTensor] = []
        for layer, times in self.layers.runs:
            r.enter(f"layer.{layer}")
            r.repeats[f"layer.{layer}"] = times
            repeated = RepeatedLayer(r, times) if times > 1 else None
            x = repeated.entered(x) if repeated else x
            x, residual, *aux_loss = self._block(layer, x, residual, tables)
            aux_losses += aux_loss
            x = repeated.left(x) if repeated else x
        r.enter("head" if self.layers.has_head else "output")
        if not self.layers.has_head:
            total = x if residual is None else sharded_sum(r, x, residual)
            local, held = local_part(r, total)
            return _with_aux_losses(r, redistribute(r, local, held, self.boundary), aux_losses)
        x, _ = self._norm("final_norm", x, residual)
        del residual
        r.enter("loss")  # whose backward ends before the head's first gradient has a buffer
        with r.tape.category("logits"):
            loss = head_loss(self.s, x, targets, self.parameters["head.weight"])
        self.s.left("")
        return _with_aux_losses(r, loss, aux_losses)

    def _positions(self) -> SymbolicTensor:
        """Rotary tables, as one tensor."""
        shape, length = self.r.w.shape, int(self.r.w.tokens / self.r.w.sequences)
        wide = shape.head_dim if shape.positions == "rope" else 0
        return self.r.empty((length, int(wide or 0)))

    def _embedding(self, tokens: SymbolicTensor) -> SymbolicTensor:
        r, shape = self.r, self.r.w.shape
        x = embed(self.s, tokens, self.parameters["embedding.tokens.weight"])
        if shape.positions == "learned":
            indices = r.empty(tokens.shape[1:], TOKEN_ID_BYTES)
            table = self.parameters[f"{POSITIONS}.weight"]
            x = add_positions(r, x, embed_positions(self.s, indices, table))
        if shape.embedding_norm:
            x, _ = self._norm("embedding.norm", x, None)
        self.s.left("embedding")
        return dropped(r, x, self.rows)

    def _block(
        self, layer: int, x: SymbolicTensor, residual: SymbolicTensor | None, tables: SymbolicTensor
    ) -> tuple[SymbolicTensor, ...]:
        """(branch, residual), and the aux loss of an MoE layer."""
        block = f"blocks.{layer}"
        forward = partial(self._block_forward, block, tables)
        if block in self.recomputed:
            total = x if residual is None else sharded_sum(self.r, x, residual)
            last = f"{block}.mlp.down" if self.rows is None else ""  # dropout's ids come last
            moe = self._moe(f"{block}.mlp")
            last = moe.last_saving if moe and last else last
            return checkpointed(self.r, forward, last, total)
        return forward(x, residual)

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
        branch = dropped(self.r, branch, self.rows)
        h, summed = self._norm(f"{block}.mlp_norm", branch, summed)
        path, aux_loss = f"{block}.mlp", None
        if moe := self._moe(path):
            branch, aux_loss = moe.forward(h)
        else:
            (branch,) = self._module(path, partial(self._mlp, path), f"{path}.down", h)
        branch = dropped(self.r, branch, self.rows)
        self.s.left(block)
        return (branch, summed) if aux_loss is None else (branch, summed, aux_loss)

    def _moe(self, path: str) -> SymbolicMoe | None:
        own = {
            name.removeprefix(f"{path}."): p
            for name, p in self.parameters.items()
            if name.startswith(f"{path}.")
        }
        if "route.weight" not in own:
            return None
        return SymbolicMoe(self.s, path, own, path in self.recomputed)

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
        core = self._attend(f"{path}.attend")
        (attended,) = self.s.local(f"{path}.attend", core, HEAD_DIMS, q, k, v)
        output = self._linear(f"{path}.o", flattened(self.r, attended))
        self.s.left(path)
        return (output,)

    def _attend(self, path: str) -> LocalFn:
        """Attention; what is recomputed of it communicates nothing but in a ring."""
        w = self.r.w
        own = self._local(path, ring_attend if w.ring > 1 else attend, "")
        return partial(ulysses_attend, self.r, own) if w.ulysses > 1 else own

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


def _with_aux_losses(
    r: SymbolicRank, y: SymbolicTensor, aux_losses: list[SymbolicTensor]
) -> SymbolicTensor:
    """The loss, or a stage's output, with the aux losses of its layers."""
    if not aux_losses:
        return y
    size, count = r.w.upcast_bytes, len(aux_losses)

    def backward(gradient: SymbolicTensor) -> Gradients:
        return gradient, *(r.empty((), size) for _ in range(count))

    return r.made(y, backward, y, *aux_losses)


def part_of(parameter: str) -> str:
    """The part of a stage that a parameter belongs to."""
    first, second, *_ = parameter.split(".")
    return {"blocks": f"layer.{second}", "embedding": first}.get(first, "head")
