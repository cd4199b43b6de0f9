"""What blocks read, put out and keep for backward, from one forward pass.

As of its time, what is computed between two blocks belongs to the one that ended. So the output of
a block is what others read of its operators and those after it: of `x = x + block(x)` the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from workbench.engine.layer_times.model_blocks import Block
from workbench.engine.layer_times.tensors_within import tensors_within

Node = Any
"""Of autograd: the operator that made a tensor."""


class BlockTrace:
    """Sizes and edges of `blocks`, once `run` has been called.

    Attributes:
        order: Blocks in the order of their first calls.
        reads: Block -> the blocks before it whose outputs it reads. A block that is called again
            after one that reads it also reads that one: both stand as that the later reads.
    """

    def __init__(self, blocks: Sequence[Block], model: nn.Module) -> None:
        self.blocks = blocks
        self.order: list[int] = []
        self.reads: list[set[int]] = [set() for _ in blocks]
        self._read: list[dict[tuple[Node, int], int]] = [{} for _ in blocks]
        """Tensors of a block that others read, and their bytes."""
        self._own: list[dict[tuple[Node, int], int]] = [{} for _ in blocks]
        self._kept: list[dict[int, int]] = [{} for _ in blocks]
        self._maker: dict[Node, int] = {}
        held = [*model.parameters(), *model.buffers()]
        self._persistent = {x.untyped_storage().data_ptr() for x in held}
        self._running: list[int] = []
        self._last: int | None = None
        """The block that ended last."""

    @property
    def output_bytes(self) -> list[int]:
        """Of what other blocks read of a block; of its own outputs where none does."""
        return [sum((read or own).values()) for read, own in zip(self._read, self._own)]

    @property
    def kept_bytes(self) -> list[int]:
        """Of what autograd keeps while a block runs, parameters and buffers aside; what two blocks
        keep counts for both.
        """
        return [sum(storages.values()) for storages in self._kept]

    def run(self, forward: Callable[[], Tensor]) -> Tensor:
        """Trace one forward; what it returns."""
        saved = torch.autograd.graph.saved_tensors_hooks(self._save, lambda x: x)
        with self._watching(), saved:
            return forward()

    @contextmanager
    def _watching(self) -> Iterator[None]:
        handles = []
        for index, block in enumerate(self.blocks):
            for module in block.modules:
                enter, leave = partial(self._enter, index), partial(self._leave, index)
                handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
                handles.append(module.register_forward_hook(leave))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, index: int, module: nn.Module, args: Any, kwargs: Any) -> None:
        if index not in self.order:
            self.order.append(index)
        for x in tensors_within((args, kwargs)):
            if x.grad_fn is not None:
                self._note(x.grad_fn, x.output_nr, _nbytes(x), index)
        self._running.append(index)

    def _note(self, node: Node, output: int, size: int, reader: int) -> None:
        """That `reader` reads a tensor."""
        maker = self._maker_of(node, reader)
        if maker != reader:
            first, later = sorted((maker, reader), key=self.order.index)
            self.reads[later].add(first)
            known = self._read[maker].get((node, output), 0)
            self._read[maker][node, output] = max(known, size)

    def _maker_of(self, node: Node, reader: int) -> int:
        """The block that a node belongs to; what no block has yet goes to the one that ended
        last, which reads what that follows from.
        """
        if node in self._maker:
            return self._maker[node]
        owner, nodes = reader if self._last is None else self._last, [node]
        while nodes:
            each = nodes.pop()
            self._maker[each] = owner
            for before, output in each.next_functions:
                if before in self._maker:
                    size = self._own[self._maker[before]].get((before, output), 0)
                    self._note(before, output, size, owner)  # 0 where only operators read it
                elif before is not None:
                    nodes.append(before)
        return owner

    def _leave(self, index: int, module: nn.Module, args: Any, output: Any) -> None:
        self._running.pop()
        self._last = index
        if module is not self.blocks[index].modules[-1]:  # read by the rest of the block alone
            self._own[index].clear()
        for x in tensors_within(output):
            if x.grad_fn is not None:
                self._maker.setdefault(x.grad_fn, index)
                self._own[index][x.grad_fn, x.output_nr] = _nbytes(x)

    def _save(self, x: Tensor) -> Tensor:
        index = self._running[-1] if self._running else self._last
        storage = x.untyped_storage()
        if index is not None and storage.data_ptr() not in self._persistent:
            self._kept[index][storage.data_ptr()] = storage.nbytes()
        return x


def _nbytes(x: Tensor) -> int:
    return x.numel() * x.element_size()
