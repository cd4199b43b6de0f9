"""Runs a rank's row of a schedule table on its stages: one step of training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from workbench.parallel.mesh import MeshAxis
from workbench.parallel.pipeline.stage_transfers import post
from workbench.parallel.pipeline.zero_bubble import Deferred, SplitLinears, finish
from workbench.schedules import Action, Table, batches, forwards

Observer = Callable[[str, Action | None], AbstractContextManager[None]]
"""Called round each action with its label; measures, and changes nothing."""
Key = tuple[int, int]
"""(stage, microbatch)."""


@dataclass
class Flight:
    """What lives between an action and the next one of the same microbatch."""

    inputs: dict[Key, Tensor] = field(default_factory=dict)
    outputs: dict[Key, Tensor] = field(default_factory=dict)
    """What a stage made, until it is sent; the backward holds on to the graph alone."""
    graphs: dict[Key, GradientEdge | Tensor] = field(default_factory=dict)
    """Where the backward of a microbatch begins: the loss, or the edge into the graph of an output.
    """
    gradients: dict[Key, Tensor] = field(default_factory=dict)
    """Of a stage's output."""
    deferred: dict[Key, list[Deferred]] = field(default_factory=dict)
    receiving: dict[Action, dist.Work] = field(default_factory=dict)
    sending: list[tuple[dist.Work, Tensor]] = field(default_factory=list)
    loss: Tensor | None = None


@dataclass(frozen=True)
class Hooks:
    """What the executor asks of whoever keeps the parameters, and says to whom a microbatch's
    number matters.
    """

    reduce: Callable[[int], None]
    """Sum a stage's gradients over the data axis."""
    last_backward: Callable[[int], None]
    """The next backward of this stage completes its gradients."""
    add: Callable[[nn.Parameter, Tensor], None]
    """Take a gradient that autograd did not accumulate."""
    forward: Callable[[int], None] = lambda microbatch: None
    """The next forward is of this microbatch."""


class Executor:
    """Executes a lowered table on the stages of this rank, which are all that its row names.

    `boundary` makes an empty tensor for what crosses a stage boundary, [micro_batch, T, D]. The
    backward of `whole`, the head, is never split: its logits would have to be kept. So, too, an
    embedding that shares its weight on this rank is the last to give that a gradient.
    """

    def __init__(
        self,
        table: Table,
        stages: Mapping[int, nn.Module],
        axis: MeshAxis,
        boundary: Callable[[], Tensor],
        hooks: Hooks,
        whole: nn.Module | None = None,
    ) -> None:
        self.table, self.stages, self.axis, self.boundary = table, stages, axis, boundary
        self.hooks = hooks
        self.whole = (
            frozenset(id(p) for p in whole.parameters()) if whole is not None else frozenset()
        )
        row = table.rows[axis.index]
        self.row = [list(batch) for batch in batches(row)]
        self.evaluation = [list(batch) for batch in batches(forwards(table).rows[axis.index])]
        self.finals = set(_last_backwards(row))
        self.split = {_key(action) for action in row if action.kind == "I"}
        self.flight = Flight()

    def step(
        self,
        tokens_MBT: Tensor,
        targets_MBT: Tensor,
        scale: float | Tensor,
        observe: Observer | None = None,
    ) -> Tensor | None:
        """Run the row once: every microbatch forward and backward, gradients accumulated and
        reduced.

        Each microbatch's summed loss is multiplied by `scale` before backward. Returns the sum of
        the scaled losses on the rank that holds the head, None elsewhere.
        """
        return self._run(self.row, tokens_MBT, targets_MBT, scale, observe)

    def evaluate(self, tokens_MBT: Tensor, targets_MBT: Tensor) -> Tensor | None:
        """Summed loss of the microbatches without gradients, where the head is: the table's
        forwards alone.
        """
        with torch.no_grad():
            return self._run(self.evaluation, tokens_MBT, targets_MBT, None, None)

    def put_aside(self, action: Action) -> list[Tensor]:
        """What the backward of an action's microbatch has left for its weight gradients."""
        return [
            x for one in self.flight.deferred.get(_key(action), ()) for x in (one.x, one.gradient)
        ]

    def _run(
        self,
        row: list[list[Action]],
        tokens_MBT: Tensor,
        targets_MBT: Tensor,
        scale: float | Tensor | None,
        observe: Observer | None,
    ) -> Tensor | None:
        flight = self.flight = Flight()
        watch = observe or (lambda label, action: nullcontext())
        for batch in row:
            # A batch of transfers is known by what it receives: that is what stays in memory.
            action = next((a for a in batch if a.kind.startswith("RECV")), batch[0])
            with watch("+".join(map(str, batch)), action):
                if action.is_p2p:
                    self._transfer(batch, flight)
                elif action.kind == "F":
                    self._forward(action, flight, tokens_MBT, targets_MBT, scale)
                elif action.kind == "REDUCE_GRAD":
                    self.hooks.reduce(action.stage)
                else:
                    self._backward(action, flight)
        self._finish_sends(flight)
        return flight.loss

    def _forward(
        self,
        action: Action,
        flight: Flight,
        tokens: Tensor,
        targets: Tensor,
        scale: float | Tensor | None,
    ) -> None:
        stage, microbatch = key = _key(action)
        x = tokens[microbatch] if stage == 0 else self._input(key, flight)
        self.hooks.forward(microbatch)
        with self._splitting(key, flight):
            y = self.stages[stage](x, targets[microbatch])
        if stage == self.table.stages - 1:
            y = y if scale is None else y * scale
            flight.loss = y.detach() if flight.loss is None else flight.loss + y.detach()
        # A stage hands over to the next one on its rank without a transfer.
        elif self.table.placement[stage + 1] == self.axis.index:
            flight.inputs[stage + 1, microbatch] = y.detach()
        else:
            flight.outputs[key] = y.detach()
        if scale is not None:
            flight.graphs[key] = y if stage == self.table.stages - 1 else get_gradient_edge(y)

    def _input(self, key: Key, flight: Flight) -> Tensor:
        """What the former stage made; kept only where a gradient will be asked of it."""
        x = flight.inputs[key] if torch.is_grad_enabled() else flight.inputs.pop(key)
        return self._arrived(Action(key[0], "RECV_F", key[1]), x, flight).requires_grad_(
            torch.is_grad_enabled()
        )

    def _splitting(self, key: Key, flight: Flight) -> AbstractContextManager[object]:
        if key not in self.split or not torch.is_grad_enabled():
            return nullcontext()
        return SplitLinears(flight.deferred.setdefault(key, []), self.whole)

    def _backward(self, action: Action, flight: Flight) -> None:
        stage, microbatch = key = _key(action)
        if action in self.finals:
            self.hooks.last_backward(stage)
        if action.kind == "W":
            return finish(flight.deferred.pop(key), self.hooks.add)
        gradient = flight.gradients.pop(key, None)
        if gradient is not None:
            self._arrived(Action(stage, "RECV_B", microbatch), gradient, flight)
        torch.autograd.backward(flight.graphs.pop(key), gradient)
        x = flight.inputs.pop(key, None)
        if x is not None:
            assert x.grad is not None
            flight.gradients[stage - 1, microbatch] = x.grad
        return None

    def _transfer(self, batch: list[Action], flight: Flight) -> None:
        # What was sent before is held no longer than until here; lowered tables are proved safe for
        # it.
        self._finish_sends(flight)
        sends = [self._outgoing(a, flight) for a in batch if a.kind.startswith("SEND")]
        receivers = [a for a in batch if a.kind.startswith("RECV")]
        receives = [self._incoming(a, flight) for a in receivers]
        works = post(sends, receives, self.axis)
        # A coalescing backend gives one handle for the whole batch; the others one an operation.
        works = works if len(works) == len(batch) else works * len(batch)
        flight.receiving.update(zip(receivers, works[len(sends) :]))
        flight.sending += [(work, x) for work, (x, _) in zip(works, sends)]

    def _outgoing(self, action: Action, flight: Flight) -> tuple[Tensor, int]:
        stage, microbatch = key = _key(action)
        if action.kind == "SEND_F":
            return flight.outputs.pop(key), self.table.placement[stage + 1]
        return flight.gradients.pop((stage - 1, microbatch)), self.table.placement[stage - 1]

    def _incoming(self, action: Action, flight: Flight) -> tuple[Tensor, int]:
        x = self.boundary()
        stage, microbatch = _key(action)
        (flight.inputs if action.kind == "RECV_F" else flight.gradients)[stage, microbatch] = x
        return x, self.table.placement[stage + (-1 if action.kind == "RECV_F" else 1)]

    def _arrived(self, receive: Action, x: Tensor, flight: Flight) -> Tensor:
        work = flight.receiving.pop(receive, None)
        if work is not None:
            work.wait()
        return x

    def _finish_sends(self, flight: Flight) -> None:
        for work, _ in flight.sending:
            work.wait()
        flight.sending.clear()


def _key(action: Action) -> Key:
    assert action.microbatch is not None
    return action.stage, action.microbatch


def _last_backwards(row: tuple[Action, ...]) -> Iterator[Action]:
    last = {action.stage: action for action in row if action.kind in ("B", "W")}
    yield from last.values()
