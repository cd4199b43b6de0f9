"""Pages that print the peak memory of a run's first step, as `data/validation` says from what their
framework's source says of its log.
"""

from __future__ import annotations

from functools import lru_cache

from workbench import data_files

READINGS_FILE = "data/validation/first_step_readings.yaml"


@lru_cache(maxsize=4096)
def reads_first_step(source: str, model: str) -> bool:
    """Whether the readings of a `model` on a page were taken after the first step of a run, when
    activations met no optimizer moments yet.
    """
    entries: list[dict[str, str]] = data_files.read_data_file(READINGS_FILE)
    return any(one["source"] in source and one["model"] in model for one in entries)
