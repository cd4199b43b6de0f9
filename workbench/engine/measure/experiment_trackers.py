"""TensorBoard, Weights & Biases and MLflow through Accelerate's trackers."""

from __future__ import annotations

import importlib.util
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from accelerate import Accelerator

    from workbench.plan.schema import Plan


def require_trackers(names: Iterable[str]) -> None:
    """Check before launch that the trackers' packages are installed.

    Accelerate itself silently skips a tracker that is not installed.

    Raises:
        ValueError: Names the field and the missing packages.
    """
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(
            f"telemetry.trackers: {', '.join(missing)} not installed; "
            f"`pip install {' '.join(missing)}`, or leave it out of the list"
        )


class Trackers:
    """The plan's trackers; only the main process writes.

    A failing tracker (an unreachable service) does not end the run: it is reported once, and all
    trackers are dropped.

    Args:
        accelerator: Made with `log_with` and a project folder.
        plan: The plan, which is logged as the configuration.
    """

    def __init__(self, accelerator: Accelerator, plan: Plan) -> None:
        require_trackers(plan.telemetry.trackers)
        self._accelerator: Accelerator | None = accelerator if plan.telemetry.trackers else None
        if self._accelerator is not None:
            config = dict(flatten_config(plan.model_dump(mode="json")))
            self._accelerator.init_trackers("workbench", config=config)

    def log(self, record: Mapping[str, Any], step: int) -> None:
        """Log the numbers of a record."""
        if self._accelerator is None:
            return
        numbers = {
            k: float(v) for k, v in record.items() if isinstance(v, int | float) and k != "step"
        }
        try:
            self._accelerator.log(numbers, step=step)
        except Exception as error:
            print(
                f"telemetry.trackers: gave up after {type(error).__name__}: {error}",
                file=sys.stderr,
            )
            self._accelerator = None

    def close(self) -> None:
        """Flush and close the trackers."""
        if self._accelerator is not None:
            for tracker in self._accelerator.trackers:
                tracker.finish()
            self._accelerator = None


def flatten_config(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves of nested data by dotted name; lists and null, which trackers cannot hold, as text."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from flatten_config(item, f"{name}.{key}" if name else str(key))
    else:
        yield name, value if isinstance(value, bool | int | float | str) else str(value)
