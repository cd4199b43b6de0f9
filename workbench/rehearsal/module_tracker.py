"""Which module computes: in forward by its hooks, in backward by the operator that autograd
differentiates.

Autograd numbers its nodes in the order of forward, so that the numbers at which modules begin and
end say whose a node is.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn

if not "2.11" <= torch.__version__ < "2.14":
    raise ImportError(
        f"workbench.rehearsal.module_tracker uses autograd's private numbers of torch 2.11 to "
        f"2.13, not {torch.__version__}"
    )


class ModuleTracker:
    """Follows the modules of a rank's stages.

    Args:
        stages: Whose modules are followed.
    """

    def __init__(self, stages: Iterable[nn.Module]) -> None:
        self._stages = list(stages)
        self._within: list[str] = []
        self._starts: list[int] = []
        """Numbers of autograd's nodes at which another module began or ended."""
        self._modules: list[str] = []
        """The module from each of these numbers on."""

    def current(self) -> str:
        """Path of the module that computes; empty outside of all."""
        if self._within:
            return self._within[-1]
        node = torch._C._current_autograd_node()
        if node is None:
            return ""
        at = bisect_right(self._starts, node._sequence_nr()) - 1
        return self._modules[at] if at >= 0 else ""

    @contextmanager
    def following(self) -> Iterator[None]:
        """A context in which modules are followed."""
        handles = []
        for path, module in (found for stage in self._stages for found in stage.named_modules()):
            if path:
                handles.append(module.register_forward_pre_hook(partial(self._begin, path)))
                handles.append(module.register_forward_hook(self._end, always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _begin(self, path: str, *_: object) -> None:
        self._within.append(path)
        self._note()

    def _end(self, *_: object) -> None:
        self._within.pop()
        self._note()

    def _note(self) -> None:
        self._starts.append(torch._C._autograd._get_sequence_nr())
        self._modules.append(self._within[-1] if self._within else "")
