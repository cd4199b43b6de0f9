"""A traced module run operator by operator on this rank's shards.

Between operators every tensor is local, in the layout that its producer leaves. What an operator
reads in another layout is redistributed first, once for all that read it so; the gradients of those
are added before backward's one redistribution.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from workbench.models.counter_dropout import SampleIndices
from workbench.parallel.operators.factor_redistribution import FactorGrid, Spread, redistributed
from workbench.parallel.operators.local_operators import LocalCall, run_locally
from workbench.plan.operators.traced.graph_placement import NodeShards, ParameterShards
from workbench.plan.operators.traced.node_factors import FactoredGraph
from workbench.plan.operators.traced.stage_cuts import GraphStage
from workbench.plan.operators.traced.traced_graph import TensorRef, TracedNode


@dataclass
class TracedForward:
    """forward(tokens [B, T], targets [B, T]) -> summed loss, of a module traced at that shape.

    Attributes:
        module: Holds the parameters and buffers, which are read by name at each forward.
        factored: Its graph.
        stage: The part of the graph that runs.
        shards: Node id -> how it is sharded.
        stored: Parameter id -> how it is stored.
        constants: Tensors that the module's code makes of numbers, by id.
        grid: The ranks.
        samples: Which samples the next forward sees, for dropout.
        seed: Of dropout.
    """

    module: nn.Module
    factored: FactoredGraph
    stage: GraphStage
    shards: Mapping[str, NodeShards]
    stored: Mapping[str, ParameterShards]
    constants: Mapping[str, Tensor]
    grid: FactorGrid
    samples: SampleIndices
    seed: int
    _last_use: dict[str, list[TensorRef]] = field(init=False)

    def __post_init__(self) -> None:
        last: dict[TensorRef, str] = {}
        for node in self.stage.nodes:
            last |= dict.fromkeys(
                [*node.inputs, *(TensorRef(node.id, i) for i in range(len(node.outputs)))], node.id
            )
        last.pop(self.stage.written, None)
        self._last_use = {}
        for ref, node_id in last.items():
            self._last_use.setdefault(node_id, []).append(ref)

    def __call__(self, x: Tensor, targets_BT: Tensor) -> Tensor:
        """The loss summed over this microbatch, equal on every rank of the grid; or what the next
        stage reads. `x` are the tokens [B, T], or what the stage before has written.
        """
        graph, read = self.factored.graph, self.stage.read
        run = _Run(self, x.device)
        known = self.shards.get(read.source)
        run.hold(read, x, None if known is None else Spread(known.outputs[read.index]))
        assert graph.targets is not None
        run.hold(TensorRef(graph.targets), targets_BT)
        for node in self.stage.nodes:
            run.compute(node)
            for ref in self._last_use.get(node.id, ()):
                run.release(ref)
        return run.values[self.stage.written].contiguous()


class _Run:
    """One forward: the tensors that are alive."""

    def __init__(self, forward: TracedForward, device: torch.device) -> None:
        self.of, self.device = forward, device
        self.values: dict[TensorRef, Tensor] = {}
        self.held: dict[TensorRef, Spread] = {}
        self.read: dict[TensorRef, dict[Spread, Tensor]] = {}
        graph = forward.factored.graph
        for key in {ref.source for node in forward.stage.nodes for ref in node.inputs}:
            if key in graph.buffers:
                self.hold(TensorRef(key), forward.module.get_buffer(graph.buffers[key]))
            elif key in forward.constants:
                self.hold(TensorRef(key), forward.constants[key].to(device))
            elif key in graph.parameters:
                value = forward.module.get_parameter(graph.parameters[key])
                self.hold(TensorRef(key), value, Spread(forward.stored[key].layout))

    def hold(self, ref: TensorRef, value: Tensor, spread: Spread | None = None) -> None:
        """Keep a tensor; by default every rank has all of it."""
        self.values[ref] = value
        self.held[ref] = spread or Spread((None,) * len(self.of.grid.sides))

    def release(self, ref: TensorRef) -> None:
        """Forget a tensor after its last use."""
        for table in (self.values, self.held, self.read):
            table.pop(ref, None)

    def compute(self, node: TracedNode) -> None:
        """Run one operator and keep its results, summed."""
        of, own = self.of, self.of.shards[node.id]
        inputs = [
            self._reading(ref, Spread(layout, partial))
            for ref, layout, partial in zip(node.inputs, own.inputs, own.partial_inputs)
        ]
        refs = [TensorRef(node.id, i) for i in range(len(node.outputs))]
        factors = [of.factored.tensors[ref] for ref in refs]

        def reduce(y: Tensor, over: frozenset[int] = own.partial) -> Tensor:
            summed = Spread(own.outputs[0])
            ways = Spread(own.outputs[0], over), summed, summed, summed
            return redistributed(y, None, of.grid, factors[0], ways)

        call = LocalCall(
            node,
            own,
            of.factored.nodes[node.id],
            [of.factored.tensors[ref] for ref in node.inputs],
            factors,
            of.grid,
            self.device,
            of.samples,
            of.seed,
            of.factored.batch,
            reduce,
        )
        results = run_locally(call, inputs)
        for ref, value, layout in zip(refs, results, own.outputs):
            self.hold(ref, value, Spread(layout))

    def _reading(self, ref: TensorRef, wanted: Spread) -> Tensor:
        """A tensor as an operator reads it."""
        if ref.source in self.of.stored:
            return self._parameter(ref, wanted)
        known = self.read.setdefault(ref, {})
        if wanted not in known:
            target, source = Spread(wanted.layout), self.held[ref]
            same = next((y for s, y in known.items() if s.layout == wanted.layout), None)
            ways = source, target, wanted, source
            factors = self.of.factored.tensors[ref]
            differentiable = self.values[ref].is_floating_point() or self.values[ref].is_complex()
            known[wanted] = redistributed(
                self.values[ref],
                None if same is None else same.detach(),
                self.of.grid,
                factors,
                ways if differentiable else (source, target, target, target),
            )
        return known[wanted]

    def _parameter(self, ref: TensorRef, wanted: Spread) -> Tensor:
        """A parameter as an operator reads it. Its gradient stays a partial sum over the axes over
        which it is summed once a step.
        """
        grid, factors = self.of.grid, self.of.factored.tensors[ref]
        stored = self.of.stored[ref.source]
        own = tuple(
            at if axis in stored.summed else mine
            for axis, (at, mine) in enumerate(zip(wanted.layout, stored.layout))
        )
        value = self.values[ref]
        if own != stored.layout:
            sizes = grid.local_sizes(factors, stored.layout)
            value = self.values[ref].reshape(sizes)
            for factor, size in enumerate(grid.local_sizes(factors, own)):
                if size != sizes[factor]:
                    value = value.narrow(factor, grid.first(own, factor, size), size)
            value = value.reshape(grid.local_shape(factors, own))
        target, source = Spread(wanted.layout), Spread(own)
        gradient = Spread(wanted.layout, wanted.partial - stored.summed)
        return redistributed(value, None, grid, factors, (source, target, gradient, source))
