"""Executes a pipeline schedule: a rank's row of the table of actions, on its stages.

Tables are lowered before: SEND and RECV actions stand where transfers are issued. Backward actions
are B (full), I (input gradient) and W (weight gradient, zero bubble); REDUCE_GRAD reduces a stage's
gradients over data parallelism.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from workbench.parallel.mesh import MeshAxis
from workbench.parallel.pipeline.stage_transfers import Transfer, start_recv, start_send
from workbench.parallel.pipeline.zero_bubble import (
    DeferredWeightGrad,
    SplitBackward,
    compute_deferred_weight_grads,
)
from workbench.schedules import Action, Table, forwards
from workbench.schedules.action import RECVS, SENDS

Observer = Callable[[str, Action | None], AbstractContextManager[None]]
"""Context entered around each action, with its label; it measures, and changes nothing."""
StageMicrobatch = tuple[int, int]
"""(stage, microbatch)."""


@dataclass
class MicrobatchState:
    """Tensors that live from one action of a microbatch to its next one."""

    inputs: dict[StageMicrobatch, Tensor] = field(default_factory=dict)
    outputs: dict[StageMicrobatch, Tensor] = field(default_factory=dict)
    """Outputs of a stage until they are sent; backward needs only the graph behind them."""
    graph_roots: dict[StageMicrobatch, GradientEdge | Tensor] = field(default_factory=dict)
    """Where backward starts: the loss, or the edge into the graph of an output."""
    output_gradients: dict[StageMicrobatch, Tensor] = field(default_factory=dict)
    deferred: dict[StageMicrobatch, list[DeferredWeightGrad]] = field(default_factory=dict)
    receiving: dict[Action, Transfer] = field(default_factory=dict)
    sending: list[tuple[Transfer, Tensor, Action]] = field(default_factory=list)
    loss: Tensor | None = None


@dataclass(frozen=True)
class ExecutorHooks:
    """What the executor calls on the store of parameters and gradients, and before a forward."""

    reduce: Callable[[int], None]
    """Reduce a stage's gradients over data parallelism."""
    expect_last_backward: Callable[[int], None]
    """The next backward of this stage completes its gradients."""
    accumulate: Callable[[nn.Parameter, Tensor], None]
    """Add a gradient that autograd does not accumulate."""
    accumulate_product: Callable[[nn.Parameter, Tensor, Tensor], None]
    """The same of a weight, by the factors of its gradient."""
    before_forward: Callable[[int], None] = lambda microbatch: None
    """The next forward is of this one of the rank's microbatches."""
    sends_end: Mapping[Action, int] | None = None
    """Send -> index in the row of the action at which it is waited for, at the latest: by then the
    simulated schedule has it over. None: works say when they are completed, as NCCL's do; gloo's
    say so only once they have been waited for.
    """


class ScheduleExecutor:
    """Executes a lowered table on this rank's stages, for every schedule alike.

    Args:
        table: Lowered table; its row of this rank names the stages in `stages` only.
        stages: Stage -> its module.
        axis: The pipeline axis.
        empty_boundary: Makes an empty tensor of the shape that crosses a stage boundary,
            [B, T, D].
        hooks: What is called on the store of gradients.
        unsplit: The head, whose backward is never split: its output gradient, of the vocabulary's
            width, would have to be kept until W. An embedding that shares the head's weight on
            this rank is therefore the last to add to that weight's gradient.
    """

    def __init__(
        self,
        table: Table,
        stages: Mapping[int, nn.Module],
        axis: MeshAxis,
        empty_boundary: Callable[[], Tensor],
        hooks: ExecutorHooks,
        unsplit: nn.Module | None = None,
    ) -> None:
        self.table, self.stages, self.axis = table, stages, axis
        self.empty_boundary, self.hooks = empty_boundary, hooks
        self.unsplit = unsplit
        self.unsplit_weights = (
            frozenset(id(p) for p in unsplit.parameters()) if unsplit is not None else frozenset()
        )
        row = table.rows[axis.index]
        self.row = row
        self.evaluation_row = forwards(table).rows[axis.index]
        own = sorted({action.microbatch or 0 for action in self.evaluation_row})
        self.places = {microbatch: place for place, microbatch in enumerate(own)}
        """Microbatch -> which of this rank's it is."""
        self.last_backwards = set(_last_backward_actions(row))
        self.split_keys = {_key(action) for action in row if action.kind == "I"}
        self.state = MicrobatchState()

    def step(
        self,
        tokens_MBT: Tensor,
        targets_MBT: Tensor,
        scale: float | Tensor,
        observe: Observer | None = None,
    ) -> Tensor | None:
        """Run the row once: forward and backward of all microbatches, gradients reduced.

        Args:
            tokens_MBT: [microbatches, B, T], this rank's sequences of each of its microbatches;
                read by the first stage.
            targets_MBT: The same shape; read by the last stage.
            scale: What each microbatch's summed loss is multiplied by before backward.
            observe: Entered around each action.

        Returns:
            The sum of the scaled losses on the rank that holds the head, None elsewhere.
        """
        return self._run(self.row, tokens_MBT, targets_MBT, scale, observe)

    def evaluate(
        self, tokens_MBT: Tensor, targets_MBT: Tensor, observe: Observer | None = None
    ) -> Tensor | None:
        """The microbatches' summed loss without gradients: the forward actions of the table alone.

        None on ranks without the head.
        """
        with torch.no_grad():
            return self._run(self.evaluation_row, tokens_MBT, targets_MBT, None, observe)

    def deferred_tensors(self, action: Action) -> list[Tensor]:
        """Operands of the weight gradients that an action's microbatch has deferred to W."""
        deferred = self.state.deferred.get(_key(action), ())
        return [x for each in deferred for x in (each.x, each.gradient)]

    def _run(
        self,
        row: tuple[Action, ...],
        tokens_MBT: Tensor,
        targets_MBT: Tensor,
        scale: float | Tensor | None,
        observe: Observer | None,
    ) -> Tensor | None:
        state = self.state = MicrobatchState()
        observe = observe or (lambda label, action: nullcontext())
        for at, action in enumerate(row):
            with observe(str(action), action):
                self._free_sent(state, at)
                self._perform(at, action, state, tokens_MBT, targets_MBT, scale)
        self._wait_sends(state)
        return state.loss

    def _perform(
        self,
        at: int,
        action: Action,
        state: MicrobatchState,
        tokens: Tensor,
        targets: Tensor,
        scale: float | Tensor | None,
    ) -> None:
        """One action, that of index `at` in the row."""
        if action.kind in SENDS:
            self._send(action, state)
        elif action.kind in RECVS:
            self._receive(action, state)
        elif action.kind == "F":
            self._forward(action, state, tokens, targets, scale)
        elif action.kind == "REDUCE_GRAD":
            self.hooks.reduce(action.stage)
        else:
            self._backward(action, state)

    def _forward(
        self,
        action: Action,
        state: MicrobatchState,
        tokens: Tensor,
        targets: Tensor,
        scale: float | Tensor | None,
    ) -> None:
        stage, microbatch = key = _key(action)
        place = self.places[microbatch]
        x = tokens[place] if stage == 0 else self._stage_input(key, state)
        self.hooks.before_forward(place)
        with self._split_context(key, state):
            y = self.stages[stage](x, targets[place])
        if stage == self.table.stages - 1:
            y = y if scale is None else y * scale
            state.loss = y.detach() if state.loss is None else state.loss + y.detach()
        # The next stage may be on this rank (V schedules): its input needs no transfer.
        elif self.table.home(stage + 1, microbatch) == self.axis.index:
            state.inputs[stage + 1, microbatch] = y.detach()
        else:
            state.outputs[key] = y.detach()
        # A first stage without adapters, of a model that has them elsewhere, has no backward.
        if scale is not None and y.requires_grad:
            # Backward starts from the edge, so that the output itself is freed once it is sent.
            state.graph_roots[key] = y if stage == self.table.stages - 1 else get_gradient_edge(y)

    def _stage_input(self, key: StageMicrobatch, state: MicrobatchState) -> Tensor:
        """The previous stage's output; kept until backward only if a gradient is asked of it."""
        x = state.inputs[key] if torch.is_grad_enabled() else state.inputs.pop(key)
        received = self._wait_receive(Action(key[0], "RECV_F", key[1]), x, state)
        return received.requires_grad_(torch.is_grad_enabled())

    def _split_context(
        self, key: StageMicrobatch, state: MicrobatchState
    ) -> AbstractContextManager[object]:
        if key not in self.split_keys or not torch.is_grad_enabled():
            return nullcontext()
        return SplitBackward(state.deferred.setdefault(key, []), self.unsplit_weights)

    def _backward(self, action: Action, state: MicrobatchState) -> None:
        """B, I or W. B and I differ only in how forward was run: under `SplitBackward` for I."""
        stage, microbatch = key = _key(action)
        if action in self.last_backwards:
            self.hooks.expect_last_backward(stage)
        if action.kind == "W":
            return compute_deferred_weight_grads(
                state.deferred.pop(key), self.hooks.accumulate, self.hooks.accumulate_product
            )
        gradient = state.output_gradients.pop(key, None)
        if gradient is not None:
            self._wait_receive(Action(stage, "RECV_B", microbatch), gradient, state)
        if (root := state.graph_roots.pop(key, None)) is not None:
            torch.autograd.backward(root, gradient)
        x = state.inputs.pop(key, None)
        if x is not None:
            assert x.grad is not None
            state.output_gradients[stage - 1, microbatch] = x.grad
        return None

    def _send(self, action: Action, state: MicrobatchState) -> None:
        x, peer = self._outgoing(action, state)
        state.sending.append((start_send(x, peer, self.axis), x, action))

    def _receive(self, action: Action, state: MicrobatchState) -> None:
        x, peer = self._incoming(action, state)
        state.receiving[action] = start_recv(x, peer, self.axis)

    def _free_sent(self, state: MicrobatchState, at: int) -> None:
        """Let go of what has been sent.

        Compute waits for no send that may not be over: on NCCL it ends only when its receiver gets
        there, and a stream that waited would idle until then.
        """
        ends, held = self.hooks.sends_end, []
        for work, x, action in state.sending:
            if ends is not None and ends[action] <= at:
                work.wait()
            elif ends is not None or not work.is_completed():
                held.append((work, x, action))
        state.sending = held

    def _outgoing(self, action: Action, state: MicrobatchState) -> tuple[Tensor, int]:
        stage, microbatch = key = _key(action)
        if action.kind == "SEND_F":
            return state.outputs.pop(key), self.table.home(stage + 1, microbatch)
        gradient = state.output_gradients.pop((stage - 1, microbatch))
        return gradient, self.table.home(stage - 1, microbatch)

    def _incoming(self, action: Action, state: MicrobatchState) -> tuple[Tensor, int]:
        x = self.empty_boundary()
        stage, microbatch = _key(action)
        if action.kind == "RECV_F":
            state.inputs[stage, microbatch] = x
            return x, self.table.home(stage - 1, microbatch)
        state.output_gradients[stage, microbatch] = x
        return x, self.table.home(stage + 1, microbatch)

    def _wait_receive(self, receive: Action, x: Tensor, state: MicrobatchState) -> Tensor:
        # Waited for as late as possible: when `x` is read, not when it is received.
        work = state.receiving.pop(receive, None)
        if work is not None:
            work.wait()
        return x

    def _wait_sends(self, state: MicrobatchState) -> None:
        for work, *_ in state.sending:
            work.wait()
        state.sending.clear()


def _key(action: Action) -> StageMicrobatch:
    assert action.microbatch is not None
    return action.stage, action.microbatch


def _last_backward_actions(row: tuple[Action, ...]) -> Iterator[Action]:
    """The last action of each stage that completes weight gradients: B, or W if it is split."""
    last = {action.stage: action for action in row if action.kind in ("B", "W")}
    yield from last.values()
