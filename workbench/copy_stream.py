"""A CUDA stream for copies between host and GPU, beside the stream that computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


class CopyStream:
    """Copies run on a stream of their own, so that compute goes on meanwhile; on CPU, at once.

    Args:
        device: Whose copies; one stream for all that share this object.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Inside, what is enqueued follows what was enqueued before, and what is enqueued
        afterwards does not wait for it.
        """
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield

    def copied(self) -> Callable[[], None]:
        """Lets the stream that later calls it wait for the copies so far, and for no later ones."""
        if self._stream is None:
            return lambda: None
        event = torch.cuda.Event()
        event.record(self._stream)
        return lambda: torch.cuda.current_stream().wait_event(event)

    def host_wait(self) -> Callable[[], None]:
        """Lets the host, once called, wait for the copies so far, and for no later ones."""
        if self._stream is None:
            return lambda: None
        event = torch.cuda.Event()
        event.record(self._stream)
        return event.synchronize

    def synchronize(self) -> None:
        """Let the host wait for all copies."""
        if self._stream is not None:
            self._stream.synchronize()
