"""The forward of a stage of a traced module on shapes, as `parallel/operators/traced_forward.py`
runs it: what an operator reads in another layout is redistributed first, once for all that read it
so.
"""

from __future__ import annotations

from collections.abc import Mapping

from workbench.costmodel.inputs.traced_stages import DTYPE_NAMES, TracedStages
from workbench.costmodel.operators.symbolic_autograd import SymbolicTensor
from workbench.costmodel.operators.symbolic_ends import lookup
from workbench.costmodel.operators.symbolic_rank import SymbolicRank
from workbench.costmodel.traced import operator_table
from workbench.costmodel.traced.entries.elementwise import added
from workbench.costmodel.traced.entries.ends import loss
from workbench.costmodel.traced.entries.products import linear, matmul
from workbench.costmodel.traced.factor_redistribution import Spread, moved, own_part
from workbench.costmodel.traced.node_call import NodeCall
from workbench.costmodel.traced.tensor_views import contiguous
from workbench.plan.operators.traced.stage_cuts import GraphStage
from workbench.plan.operators.traced.traced_graph import LOSS_OP, TensorRef, TracedNode

DIFFERENTIABLE = ("torch.float", "torch.bfloat", "torch.complex")
"""What dtypes begin with whose tensors have a gradient."""


class TracedRun:
    """One forward of a stage: the tensors that are alive."""

    def __init__(
        self,
        r: SymbolicRank,
        traced: TracedStages,
        stage: GraphStage,
        parameters: Mapping[str, SymbolicTensor],
    ) -> None:
        self.r, self.traced, self.stage, self.parameters = r, traced, stage, parameters
        self.values: dict[TensorRef, SymbolicTensor] = {}
        self.held: dict[TensorRef, Spread] = {}
        self.read: dict[TensorRef, dict[Spread, SymbolicTensor]] = {}
        self._hold_what_stays()

    def forward(self, x: SymbolicTensor, targets: SymbolicTensor) -> SymbolicTensor:
        """The loss, or what the next stage reads."""
        graph, read, last = self.traced.factored.graph, self.stage.read, self._last_uses()
        known = self.traced.shards.get(read.source)
        self._hold(read, x, None if known is None else Spread(known.outputs[read.index]))
        assert graph.targets is not None
        self._hold(TensorRef(graph.targets), targets)
        for node in self.stage.nodes:
            self._compute(node)
            for ref in last.get(node.id, ()):
                for table in (self.values, self.held, self.read):
                    table.pop(ref, None)
        return contiguous(self.r, self.values[self.stage.written])

    def _last_uses(self) -> dict[str, list[TensorRef]]:
        """Node -> the tensors that it is the last to use."""
        last: dict[TensorRef, str] = {}
        for node in self.stage.nodes:
            made = [TensorRef(node.id, i) for i in range(len(node.outputs))]
            last |= dict.fromkeys([*node.inputs, *made], node.id)
        last.pop(self.stage.written, None)
        found: dict[str, list[TensorRef]] = {}
        for ref, node_id in last.items():
            found.setdefault(node_id, []).append(ref)
        return found

    def _hold_what_stays(self) -> None:
        """Parameters, buffers and constants, whose bytes are counted elsewhere."""
        graph = self.traced.factored.graph
        for key in {ref.source for node in self.stage.nodes for ref in node.inputs}:
            ref = TensorRef(key)
            if key in graph.parameters:
                own = self.parameters[graph.parameters[key]]
                self._hold(ref, own, Spread(self.traced.stored[key].layout))
            elif key in graph.buffers or key in graph.constants:
                tensor = graph.inputs[key]
                size = DTYPE_NAMES[tensor.dtype][1]
                self._hold(ref, SymbolicTensor(self.r.tape.allocate(0), tensor.shape, size))

    def _hold(self, ref: TensorRef, value: SymbolicTensor, spread: Spread | None = None) -> None:
        self.values[ref] = value
        self.held[ref] = spread or Spread((None,) * len(self.traced.sides))

    def _compute(self, node: TracedNode) -> None:
        own = self.traced.shards[node.id]
        inputs = [
            self._reading(ref, Spread(layout, partial))
            for ref, layout, partial in zip(node.inputs, own.inputs, own.partial_inputs)
        ]
        refs = [TensorRef(node.id, i) for i in range(len(node.outputs))]
        factors, sides = self.traced.factored.tensors, self.traced.sides
        call = NodeCall(
            self.r,
            node,
            inputs,
            [
                tuple(factors[ref].local_shape(layout, sides))
                for ref, layout in zip(refs, own.outputs)
            ],
            [DTYPE_NAMES[tensor.dtype][1] for tensor in node.outputs],
            [self.traced.types[ref].dtype for ref in node.inputs],
        )
        for ref, value, layout in zip(refs, self._run(call), own.outputs):
            self._hold(ref, value, Spread(layout))

    def _run(self, call: NodeCall) -> list[SymbolicTensor]:
        """Results, summed over the ranks where they are partial."""
        partial = self.traced.shards[call.node.id].partial
        if call.node.op == LOSS_OP:
            return [self._loss(call, partial)]
        if not partial:
            return operator_table.run(call)
        if call.node.op in ("linear", "addmm"):
            return [self._split_linear(call, partial)]
        if call.node.op == "embedding":
            table, tokens = call.inputs
            return [self._summed(call.node, lookup(self.r, tokens, table, True), partial)]
        return [self._summed(call.node, y, partial) for y in operator_table.run(call)]

    def _split_linear(self, call: NodeCall, partial: frozenset[int]) -> SymbolicTensor:
        """A product whose inner dimension is sharded; the bias is added to the sum."""
        if call.node.op == "linear":
            x, weight, *bias = call.inputs
            product = linear(self.r, x, weight, None)
        else:
            *bias, x, weight = call.inputs
            product = matmul(self.r, x, weight)
        total = self._summed(call.node, product, partial)
        return added(self.r, total, bias[0], total.shape) if bias else total

    def _loss(self, call: NodeCall, partial: frozenset[int]) -> SymbolicTensor:
        placement = self.traced.shards[call.node.id].placement
        axes = tuple(a for a, local in enumerate(placement) if local == ("vocabulary", 0))
        operator_table.record_moves(call, [self.r.empty(())])
        logits, targets = call.inputs
        total = loss(self.r, logits, targets, axes)
        return self._summed(call.node, total, partial - set(axes))

    def _summed(self, node: TracedNode, y: SymbolicTensor, over: frozenset[int]) -> SymbolicTensor:
        layout, ref = self.traced.shards[node.id].outputs[0], TensorRef(node.id)
        total = Spread(layout)
        return moved(self.r, self.traced, ref, y, None, (Spread(layout, over), total, total, total))

    def _reading(self, ref: TensorRef, wanted: Spread) -> SymbolicTensor:
        """A tensor as an operator reads it."""
        if ref.source in self.traced.stored:
            return self._parameter(ref, wanted)
        known = self.read.setdefault(ref, {})
        if wanted not in known:
            target, source = Spread(wanted.layout), self.held[ref]
            same = next((y for s, y in known.items() if s.layout == wanted.layout), None)
            floats = self.traced.types[ref].dtype.startswith(DIFFERENTIABLE)
            ways = (source, target, *((wanted, source) if floats else (target, target)))
            x = self.values[ref]
            known[wanted] = moved(
                self.r, self.traced, ref, x, None if same is None else same.detached(), ways
            )
        return known[wanted]

    def _parameter(self, ref: TensorRef, wanted: Spread) -> SymbolicTensor:
        """A parameter as an operator reads it."""
        stored, x = self.traced.stored[ref.source], self.values[ref]
        own = tuple(
            at if axis in stored.summed else mine
            for axis, (at, mine) in enumerate(zip(wanted.layout, stored.layout))
        )
        if own != stored.layout:
            x = own_part(self.r, self.traced, ref, x, own)
        target, source = Spread(wanted.layout), Spread(own)
        gradient = Spread(wanted.layout, wanted.partial - stored.summed)
        return moved(self.r, self.traced, ref, x, None, (source, target, gradient, source))
