"""Batches on the device: on CUDA the next one is prepared while a step runs."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch

from workbench.engine.data.batch_sampler import Batch

if TYPE_CHECKING:
    import numpy as np

    from workbench.engine.data.batch_sampler import BatchContents, BatchSampler


class BatchFeed:
    """Fills the same tensors with each batch, in stream order.

    On CUDA a thread gathers the next step's batch into page-locked memory, from which it is copied
    without the host waiting. On CPU the step has the cores, and a thread would only take them.

    Args:
        text: Gives the batches.
        shape: [num_microbatches, micro_batch, sequence_length].
        device: Where the batches go.
        seconds: Deadline of preparing a batch.

    Attributes:
        contents: Of the loaded step; None before the first.
    """

    def __init__(
        self, text: BatchSampler, shape: tuple[int, int, int], device: torch.device, seconds: float
    ) -> None:
        self.text, self.seconds = text, seconds
        self.tokens = torch.zeros(shape, dtype=torch.long, device=device)
        self.targets = torch.zeros_like(self.tokens)
        self.starts: torch.Tensor | None = None
        self.contents: BatchContents | None = None
        self._next: tuple[int, Future[tuple[Batch, BatchContents]]] | None = None
        self._page_locked = device.type == "cuda"
        self._thread = _one_thread(device) if self._page_locked else None

    def load(self, step: int) -> Batch:
        """The batch of `step`, in the tensors that every batch is in; begins to prepare the next.

        Raises:
            TimeoutError: The batch was not prepared within the deadline.
        """
        if self._thread is None:
            batch, self.contents = self._prepare(step)
            return self._fill(batch)
        if self._next is None or self._next[0] != step:
            self._next = step, self._thread.submit(self._prepare, step)
        try:
            batch, self.contents = self._next[1].result(self.seconds)
        except TimeoutError:
            raise TimeoutError(
                f"corpus.source: the batch of step {step} was not read within {self.seconds:g} s "
                "(telemetry.timeout_seconds); the file system of the cached tokens does not answer"
            ) from None
        self._next = step + 1, self._thread.submit(self._prepare, step + 1)
        return self._fill(batch)

    def load_evaluation(self, batch: int, source: int | None = None) -> Batch:
        """The `batch`-th batch of the held-out text, or of one source's, in the same tensors."""
        return self._fill(self.text.evaluation(batch, source))

    def load_numbered(self, part: str, numbers: np.ndarray) -> Batch:
        """The sequences of these numbers (`BatchSampler.numbered`), in the same tensors."""
        return self._fill(self.text.numbered(part, numbers))

    def close(self) -> None:
        """End the thread; what it is preparing is dropped."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)

    def _prepare(self, step: int) -> tuple[Batch, BatchContents]:
        batch = self.text.batch(step)
        if self._page_locked:
            tokens, targets, starts = batch
            starts = None if starts is None else starts.pin_memory()
            batch = Batch(tokens.pin_memory(), targets.pin_memory(), starts)
        return batch, self.text.contents(step)

    def _fill(self, batch: Batch) -> Batch:
        # Page-locked memory is not given out again before the copy has left it.
        if batch.starts is not None and self.starts is None:
            self.starts = torch.zeros_like(self.tokens)
        filled = Batch(self.tokens, self.targets, self.starts)
        for into, source in zip(filled, batch, strict=True):
            if into is not None and source is not None:
                into.copy_(source, non_blocking=True)
        return filled


def _one_thread(device: torch.device) -> ThreadPoolExecutor:
    """A thread that page-locks memory for `device`: CUDA's current device is the thread's own."""
    return ThreadPoolExecutor(1, "batches", torch.cuda.set_device, (device,))
