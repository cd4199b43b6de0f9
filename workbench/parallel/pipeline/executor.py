"""Runs a rank's row of a schedule table on its stages: one step of training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from workbench.parallel.mesh import MeshAxis
from workbench.parallel.pipeline.collectives import post
from workbench.schedules import Action, Table, batches

Observer = Callable[[str, Action | None], AbstractContextManager[None]]
"""Called round each action with its label; measures, and changes nothing."""


@dataclass
class Flight:
    """What lives between an action and the next one of the same microbatch; keys are (stage, microbatch)."""

    inputs: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    outputs: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    gradients: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    receiving: dict[Action, dist.Work] = field(default_factory=dict)
    sending: list[tuple[dist.Work, Tensor]] = field(default_factory=list)
    loss: Tensor | None = None


class Executor:
    """Executes a lowered table on the stages of this rank.

    `boundary` makes an empty tensor for what crosses a stage boundary, [micro_batch, T, D]. `reduce` sums a stage's
    gradients over the data axis; `last_backward` is told before a stage's last backward of the step.
    """

    def __init__(
        self,
        table: Table,
        stages: Mapping[int, nn.Module],
        axis: MeshAxis,
        boundary: Callable[[], Tensor],
        reduce: Callable[[int], None],
        last_backward: Callable[[int], None],
    ) -> None:
        self.table, self.stages, self.axis, self.boundary = table, stages, axis, boundary
        self.reduce, self.last_backward = reduce, last_backward
        self.row = [list(batch) for batch in batches(table.rows[axis.index])]
        self.finals = set(_last_backwards(table.rows[axis.index]))

    def step(
        self, tokens_MBT: Tensor, targets_MBT: Tensor, scale: float, observe: Observer | None = None
    ) -> Tensor | None:
        """Run the row once: every microbatch forward and backward, gradients accumulated and reduced.

        Each microbatch's summed loss is multiplied by `scale` before backward. Returns the sum of the scaled
        losses on the rank that holds the head, None elsewhere.
        """
        flight = Flight()
        watch = observe or (lambda label, action: nullcontext())
        for batch in self.row:
            # A batch of transfers is known by what it receives: that is what stays in memory.
            named = next((a for a in batch if a.kind.startswith("RECV")), batch[0])
            with watch("+".join(map(str, batch)), named):
                if batch[0].is_p2p:
                    self._transfer(batch, flight)
                else:
                    self._compute(batch[0], flight, tokens_MBT, targets_MBT, scale)
        for work, _ in flight.sending:
            work.wait()
        return flight.loss

    def evaluate(self, tokens_MBT: Tensor, targets_MBT: Tensor) -> Tensor | None:
        """Summed loss of the microbatches without gradients, where the head is; stages pass on in order."""
        total: Tensor | None = None
        (stage,) = self.stages
        with torch.no_grad():
            for tokens, targets in zip(tokens_MBT, targets_MBT):
                x = tokens if stage == 0 else self._receive_from(stage - 1)
                y = self.stages[stage](x, targets)
                if stage < self.table.stages - 1:
                    for work in post([(y, self.table.placement[stage + 1])], [], self.axis):
                        work.wait()
                else:
                    total = y if total is None else total + y
        return total

    def _receive_from(self, stage: int) -> Tensor:
        x = self.boundary()
        for work in post([], [(x, self.table.placement[stage])], self.axis):
            work.wait()
        return x

    def _compute(self, action: Action, flight: Flight, tokens: Tensor, targets: Tensor, scale: float) -> None:
        match action.kind:
            case "F":
                self._forward(action, flight, tokens, targets, scale)
            case "B":
                self._backward(action, flight)
            case "REDUCE_GRAD":
                self.reduce(action.stage)
            case _:
                raise ValueError(f"schedule action {action} cannot be executed yet; F, B and REDUCE_GRAD can")

    def _forward(self, action: Action, flight: Flight, tokens: Tensor, targets: Tensor, scale: float) -> None:
        stage, microbatch = key = _key(action)
        if stage == 0:
            x = tokens[microbatch]
        else:
            x = self._arrived(Action(stage, "RECV_F", microbatch), flight.inputs[key], flight).requires_grad_()
        y = self.stages[stage](x, targets[microbatch])
        if stage == self.table.stages - 1:
            y = y * scale
            flight.loss = y.detach() if flight.loss is None else flight.loss + y.detach()
        flight.outputs[key] = y

    def _backward(self, action: Action, flight: Flight) -> None:
        stage, microbatch = key = _key(action)
        if action in self.finals:
            self.last_backward(stage)
        y, x = flight.outputs.pop(key), flight.inputs.pop(key, None)
        if stage == self.table.stages - 1:
            y.backward()
        else:
            gradient = flight.gradients.pop(key)
            torch.autograd.backward(y, self._arrived(Action(stage, "RECV_B", microbatch), gradient, flight))
        if x is not None:
            assert x.grad is not None
            flight.gradients[stage - 1, microbatch] = x.grad

    def _transfer(self, batch: list[Action], flight: Flight) -> None:
        # What was sent before is held no longer than until here; lowered tables are proved safe for it.
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
        stage, microbatch = _key(action)
        if action.kind == "SEND_F":
            return flight.outputs[stage, microbatch].detach(), self.table.placement[stage + 1]
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


def _key(action: Action) -> tuple[int, int]:
    assert action.microbatch is not None
    return action.stage, action.microbatch


def _last_backwards(row: tuple[Action, ...]) -> Iterator[Action]:
    last = {action.stage: action for action in row if action.kind == "B"}
    yield from last.values()
