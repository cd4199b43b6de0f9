"""Inputs of GEMMs that are gathered by tokens: gathered again in backward instead of kept.

Sequence parallelism (arXiv:2205.05198, section 4.2.2) keeps a rank's own tokens alone for the
weight's gradient. What activation checkpointing recomputes is kept until the backward that follows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from workbench.plan.operators import operator_layouts
from workbench.plan.operators.tensor_layout import TensorLayout

_recomputed: ContextVar[bool] = ContextVar("recomputed", default=False)


@dataclass(eq=False)
class GatheredAgain:
    """A redistributed input that its readers do not keep.

    Attributes:
        gather: Redistributes this rank's own part.
        storage: Of the input in forward.
        saves: Readers that have saved it and have not had it back.
    """

    gather: Callable[[], Tensor]
    storage: int
    saves: int = 0
    _again: Tensor | None = None

    def reader(self) -> AbstractContextManager[Any]:
        """What a GEMM runs in that reads it: it saves how to gather the input again."""
        return saved_tensors_hooks(self._pack, _unpack)

    def _pack(self, x: Tensor) -> Tensor | tuple[GatheredAgain, tuple[int, ...]]:
        if storage_of(x) != self.storage:
            return x
        self.saves += 1
        return self, tuple(x.shape)

    def taken(self) -> Tensor:
        """The input, gathered once for all that have saved it."""
        again = self.gather() if self._again is None else self._again
        self.saves -= 1
        self._again = again if self.saves else None
        return again


def _unpack(saved: Tensor | tuple[GatheredAgain, tuple[int, ...]]) -> Tensor:
    return saved if isinstance(saved, Tensor) else saved[0].taken().view(saved[1])


def storage_of(x: Tensor) -> int:
    """Identity of a tensor's storage while it lives."""
    return int(x.untyped_storage()._cdata)


def keeps_gathered(held: TensorLayout, wanted: TensorLayout) -> bool:
    """Whether a redistribution gathers tokens of an activation that is to be kept."""
    return operator_layouts.gathers_tokens(held, wanted) and not _recomputed.get()


def checkpoint_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Contexts of a checkpointed forward and of its recomputation, for `torch.utils.checkpoint`."""
    return _keeping(), _keeping()


@contextmanager
def _keeping() -> Iterator[None]:
    token = _recomputed.set(True)
    try:
        yield
    finally:
        _recomputed.reset(token)


def reading(source: GatheredAgain | None) -> AbstractContextManager[Any]:
    """What a GEMM runs in that reads an input, gathered again or not."""
    return nullcontext() if source is None else source.reader()
