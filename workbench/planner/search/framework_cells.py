"""The values of a cell that the plan's framework can do."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from workbench.costmodel.inputs.config import FixedConfig
from workbench.planner.framework_limits import FrameworkLimit
from workbench.planner.search.constraints import KNOB_FIELDS, PIPELINE_FIELDS
from workbench.planner.search.layer_splits import LayerSplit

PIPELINE_KNOBS = ("schedule", "chunks", "pipeline")
"""By place in `PIPELINE_FIELDS`."""


def possible_splits(
    s: FixedConfig, splits: tuple[LayerSplit, ...], limits: Iterable[FrameworkLimit]
) -> tuple[LayerSplit, ...]:
    """The splits of a cell that no limit of its framework rules out."""
    for limit in limits:
        if all(c.holds_for(getattr(s, _knob(c.field))) for c in limit.when if _of_cell(c.field)):
            of_split = [c for c in limit.when if not _of_cell(c.field)]
            splits = tuple(
                split
                for split in splits
                if not all(c.holds_for(_split_value(split, c.field)) for c in of_split)
            )
    return splits


def _knob(field: str) -> str:
    return (
        PIPELINE_KNOBS[PIPELINE_FIELDS[field]] if field in PIPELINE_FIELDS else KNOB_FIELDS[field]
    )


def _of_cell(field: str) -> bool:
    return _knob(field) not in LayerSplit._fields


def _split_value(split: LayerSplit, field: str) -> Any:
    return getattr(split, _knob(field))
