"""GPUs, data parallelism and batches of a row: as printed, or as its other fields imply them."""

from __future__ import annotations

import re

from workbench.planner.validation.framework_names import FrameworkDefaults
from workbench.planner.validation.measured_rows import MeasuredRow
from workbench.planner.validation.row_shapes import Inexpressible

MAX_BATCH_ROUNDING = 0.01
"""Share by which a rate times a step's seconds may miss a whole number of samples: rates are
printed to three digits.
"""
MICROBATCHES = "training.num_microbatches"
"""A framework's default number of microbatches of a pipeline; the value `pipeline.size`: one a
rank.
"""


def num_gpus(row: MeasuredRow) -> int | None:
    """Ranks of the job: as printed, else the product of the axes."""
    others = row.tensor * row.pipeline * row.context
    return row.gpus or (others * row.data if row.data else None)


def gpus_and_data_size(row: MeasuredRow) -> tuple[int, int]:
    """(ranks, size of data parallelism). Raises `Inexpressible` where the axes do not multiply to
    the GPUs, or experts are spread over more ranks than there are.
    """
    gpus, others = num_gpus(row), row.tensor * row.pipeline * row.context
    if gpus is None:
        raise Inexpressible("missing n_gpus")
    if gpus % others:
        raise Inexpressible("layout contradicts the number of GPUs")
    data = gpus // others
    if row.data is not None and row.data not in (data, data * row.context):
        raise Inexpressible("layout contradicts the number of GPUs")
    if row.expert > 1 and (data * row.context * row.tensor) % row.expert:
        raise Inexpressible("layout contradicts the number of GPUs")
    return gpus, data


def stated_batch(row: MeasuredRow, data: int) -> tuple[int | None, int | None]:
    """(micro-batch, global batch) in sequences, as far as the row says or implies them."""
    batch = row.batch or _batch_of_rate(row) or _batch_of_ranks(row, data)
    micro, steps = row.micro_batch, row.accumulation
    if micro is None and batch is not None and (steps or batch == data):
        micro = batch // (data * (steps or 1)) or None
    if batch is None and micro is not None and steps is not None:
        batch = micro * data * steps
    return micro, batch


def batch_sizes(row: MeasuredRow, data: int, framework: FrameworkDefaults) -> tuple[int, int, bool]:
    """(micro-batch, global batch, whether the row says so much); what it leaves open is the
    framework's documented default. Raises `Inexpressible`.
    """
    micro, batch = stated_batch(row, data)
    if micro is None and batch is not None and row.pipeline > 1:
        micro = _usual_micro_batch(framework, batch, data, row.pipeline)
    if micro is None:
        raise Inexpressible("missing mbs")
    if batch is None and row.pipeline > 1:
        raise Inexpressible("missing gbs")
    known = batch is not None
    usual = framework.defaults.get("training.global_batch", 0)
    if not known and usual % (micro * data) == 0:
        batch = usual
    batch, steps = batch or micro * data, row.accumulation
    if batch % (micro * data) or (steps and micro * data * steps != batch):
        raise Inexpressible("batch fields contradict")
    return micro, batch, known


def _usual_micro_batch(
    framework: FrameworkDefaults, batch: int, data: int, pipeline: int
) -> int | None:
    """Sequences of a microbatch where the framework divides a rank's batch by itself."""
    microbatches = framework.defaults.get(MICROBATCHES)
    count = pipeline if microbatches == "pipeline.size" else microbatches
    return batch // (data * count) or None if count and batch % (data * count) == 0 else None


def _batch_of_rate(row: MeasuredRow) -> int | None:
    """Sequences of a step by the printed rate and time of one; None where they make no whole
    number.
    """
    if not row.step_seconds or not row.samples_per_second:
        return None
    batch = row.samples_per_second * row.step_seconds
    found = round(batch)
    return found if found >= 1 and abs(batch - found) <= MAX_BATCH_ROUNDING * found else None


def _batch_of_ranks(row: MeasuredRow, data: int) -> int | None:
    """Sequences of a step where the notes say how many a data-parallel rank has."""
    said = re.search(
        r"(?:local batch(?: size)?|batch size per (?:dp|data.parallel)(?: rank)?)"
        r"(?: printed)?\W{0,3}(\d+)\b",
        row.notes.lower(),
    )
    return int(said.group(1)) * data or None if said else None
