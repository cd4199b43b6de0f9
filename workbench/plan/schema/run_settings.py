"""What a run reads, saves and measures, whatever its task."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from workbench.fields.bounds import KEPT, SECONDS, StepsOrNever
from workbench.fields.frozen import Frozen


class Corpus(Frozen):
    """The text that is trained on."""

    source: str = Field(
        "stdlib", description="stdlib = the Python standard library's sources, or a file or folder."
    )
    tokenizer: Literal["bytes", "bpe"] = Field(
        "bytes", description="Bytes, or a BPE of the model's vocabulary."
    )
    holdout: float = Field(
        0.05, ge=0, lt=1, description="Last share of the text, kept for evaluation."
    )
    sha256: str | None = Field(
        None, description="Hash of the text; filled when a plan is resolved."
    )


class Checkpoint(Frozen):
    """What is saved, and what is loaded at the start."""

    every: StepsOrNever = Field(
        0, description="Steps between checkpoints; 0: only at the end of the run, if at all."
    )
    keep: Annotated[PositiveInt, KEPT] = Field(2, description="Checkpoints kept.")
    load: str | None = Field(
        None,
        description="Checkpoint, or folder of Hugging Face weights with fresh optimizer state, to "
        "start from.",
    )
    asynchronous: bool = Field(
        True,
        description="Steps go on while a copy in host memory is written; false: they wait, and "
        "nothing is copied.",
    )


class Telemetry(Frozen):
    """What a run measures of itself."""

    memory_every: StepsOrNever = Field(
        100,
        description="Steps between memory samples after the first two; 0: none. The step after a "
        "sample is timed.",
    )
    trackers: list[Literal["tensorboard", "wandb", "mlflow"]] = Field(
        default_factory=list, description="Accelerate trackers to write to."
    )
    timeout_seconds: Annotated[PositiveInt, SECONDS] = Field(
        120, description="Deadline of every collective."
    )
