"""Delayed parameter update (ZeRO-Offload, 2101.06840, section 5.2): the host steps by the gradients
of one step while the device computes the next.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from workbench.engine.optimizer.mixed_precision_optimizer import MixedPrecisionOptimizer
from workbench.parallel.data.offload.zero_offload import HostShards
from workbench.planned_device import HOST


class DelayedUpdate:
    """The update by the last step's gradients, which the next step makes beside its passes.

    The gradients that the optimizer reads are copies in host memory: those of the step that is
    computed are on their way there meanwhile. The last step's gradients of a run are never applied.

    Args:
        optimizer: Steps in host memory, by `HostShards.gradients`.
        host: Holds those gradients, and those on their way.
    """

    def __init__(self, optimizer: MixedPrecisionOptimizer, host: HostShards) -> None:
        self._optimizer, self._host = optimizer, host
        self._held: tuple[int, Tensor | None, Tensor | None] | None = None
        """(index, scale, skip) of the update that is to be made; None before the first step."""
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self) -> None:
        """Start the update by the last step's gradients, if there was a step."""
        if self._held is None:
            return
        self._thread = threading.Thread(target=self._update, args=self._held, daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Wait for the update.

        Raises:
            BaseException: What the update raised.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            raise self._error

    def hold(self, index: int, scale: Tensor | None, skip: Tensor | None) -> None:
        """Keep this step's gradients, which are in host memory, for the next step's update.

        Args:
            index: Selects the learning rate.
            scale: Factor of the gradients, 0-d.
            skip: 0-d; where 1, they will change nothing.
        """
        self._host.keep_gradients()
        # Copied now: later it would wait for what the device computes by then.
        self._held = (
            index,
            None if scale is None else scale.to(HOST),
            None if skip is None else skip.to(HOST),
        )

    def _update(self, index: int, scale: Tensor | None, skip: Tensor | None) -> None:
        try:
            self._optimizer.step(index, scale, skip)
        except BaseException as error:  # raised again by `finish`, in the rank's own thread
            self._error = error

    def gradients(self) -> Mapping[str, Tensor]:
        """Gradients that are held, by local name; a checkpoint's, beside `state`."""
        return {} if self._held is None else self._host.gradients

    def state(self) -> dict[str, Any] | None:
        """What of the held update a checkpoint keeps as plain data; None before the first step."""
        if self._held is None:
            return None
        index, scale, skip = self._held
        return {
            "index": index,
            "scale": None if scale is None else scale.item(),
            "skip": None if skip is None else skip.item(),
            "dtype": None if scale is None else str(scale.dtype).removeprefix("torch."),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned; `gradients` are loaded by the caller."""
        scale, skip = state["scale"], state["skip"]
        dtype = getattr(torch, state["dtype"] or "float32")
        self._held = (
            int(state["index"]),
            None if scale is None else torch.tensor(scale, dtype=dtype),
            None if skip is None else torch.tensor(skip, dtype=torch.float32),
        )
