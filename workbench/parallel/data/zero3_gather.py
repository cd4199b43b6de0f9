"""When ZeRO-3 makes parameters whole, and when it lets go of them (Zhao et al. 2023, arXiv
2304.11277).

Without a pipeline every unit (embedding, each block, final norm with head) is gathered before it
computes and freed afterwards, while the next ones are on their way: as many at once as
`data.in_flight` says. Under a pipeline a stage is gathered before its first forward and freed after
its last backward, and no hook of autograd begins a collective.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from workbench.models import Transformer
from workbench.parallel.data.bucket_parameters import Unit


class Consumer:
    """Modules that compute one after another, and the units that forward and backward read."""

    def __init__(
        self, modules: list[nn.Module], units: dict[int, Unit], read_in_backward: list[nn.Module]
    ) -> None:
        self.modules = modules
        self.forward, self.backward = (
            list(dict.fromkeys(units[id(p)] for module in read for p in module.parameters()))
            for read in (modules, read_in_backward)
        )


def consumers(model: nn.Module, units: dict[int, Unit]) -> list[Consumer]:
    """Of a stage, in the order of forward; `units` by the id of their parameters."""
    return [Consumer(modules, units, in_backward) for modules, in_backward in _modules(model)]


def _modules(model: nn.Module) -> Iterator[tuple[list[nn.Module], list[nn.Module]]]:
    """(modules of each unit, those whose parameters backward reads); a table's gradient needs only
    the indices.

    A model that is not ours is one unit: nothing says when each part of it computes.
    """
    if not isinstance(model, Transformer):
        yield [model], [model]
        return
    if model.embedding is not None:
        yield [model.embedding], [model.embedding.norm] if model.embedding.norm is not None else []
    for block in model.blocks.values():
        yield [block], [block]
    if model.head is not None and model.final_norm is not None:
        yield [model.final_norm, model.head], [model.final_norm, model.head]


class StageGatherer:
    """Keeps a stage whole from its first forward of a step until `free`."""

    def __init__(self, model: nn.Module, units: dict[int, Unit]) -> None:
        self.units = [unit for consumer in consumers(model, units) for unit in consumer.forward]
        model.register_forward_pre_hook(self._gather)
        model.register_forward_hook(self._leave)

    def free(self) -> None:
        """The stage's last backward is over."""
        for unit in self.units:
            unit.free()

    def _gather(self, *_: object) -> None:
        for unit in self.units:
            unit.start_gather()
        for unit in self.units:
            unit.gather()

    def _leave(self, *_: object) -> None:
        if not torch.is_grad_enabled():
            self.free()


class UnitGatherer:
    """Keeps one unit whole and `ahead` more, the next ones, on their way; or all from a step's
    first forward on, with `keep`.
    """

    def __init__(self, model: nn.Module, units: dict[int, Unit], keep: bool, ahead: int) -> None:
        self.consumers, self.keep, self.ahead = consumers(model, units), keep, ahead
        self._backward: int | None = None
        """The consumer that backward stands at: what runs forward again meanwhile gathers and frees
        nothing.
        """
        for index, consumer in enumerate(self.consumers):
            consumer.modules[0].register_forward_pre_hook(partial(self._enter, index))
            consumer.modules[-1].register_forward_hook(partial(self._leave, index))

    def free(self) -> None:
        """The step's last backward is over."""
        self._backward = None
        for consumer in self.consumers:
            for unit in consumer.forward:
                unit.free()

    def _enter(self, index: int, *_: object) -> None:
        if self._recomputes(index):
            return
        self._backward = None
        self._gather(self.consumers[index].forward, self._next(index))

    def _leave(self, index: int, module: nn.Module, inputs: Any, outputs: Any) -> None:
        training = torch.is_grad_enabled()
        if not self._recomputes(index):
            last = index + 1 == len(self.consumers)
            if not training or not (
                last or self.keep
            ):  # backward begins with the last one, which stays
                self._free(self.consumers[index].forward, self._next(index))
        if training:
            for output in outputs if isinstance(outputs, tuple) else (outputs,):
                if isinstance(output, Tensor) and output.requires_grad:
                    output.register_hook(partial(self._enter_backward, index))

    def _enter_backward(self, index: int, gradient: Tensor) -> None:
        if index and self._backward == index:
            return
        self._backward = index or None  # the first is not run again
        here, after = self.consumers[index], self.consumers[index + 1 : index + 2]
        if not self.keep:
            self._free([unit for consumer in after for unit in consumer.forward], here.backward)
        ahead = reversed(self.consumers[max(index - self.ahead, 0) : index])
        self._gather(here.backward, [unit for consumer in ahead for unit in consumer.backward])

    def _next(self, index: int) -> list[Unit]:
        """What forward needs soon after consumer `index`."""
        return [
            unit
            for consumer in self.consumers[index + 1 :][: self.ahead]
            for unit in consumer.forward
        ]

    def _recomputes(self, index: int) -> bool:
        return self._backward == index and torch.is_grad_enabled()

    @staticmethod
    def _gather(now: list[Unit], ahead: list[Unit]) -> None:
        for unit in (*now, *ahead):
            unit.start_gather()
        for unit in now:
            unit.gather()

    @staticmethod
    def _free(units: list[Unit], but: list[Unit]) -> None:
        for unit in units:
            if unit not in but:
                unit.free()
