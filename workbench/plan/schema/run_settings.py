"""What a run reads, saves and measures, whatever its task."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    PositiveInt,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from workbench.fields.bounds import KEPT, SECONDS, SourceWeight, StepsOrNever
from workbench.fields.frozen import Frozen

CorpusFormat = Literal[
    "text", "jsonl", "parquet", "npy", "raw", "megatron", "messages", "completions", "preferences"
]
TokenDtype = Literal["uint8", "uint16", "uint32", "int32", "int64"]
WRITTEN_IF_SET = frozenset(
    {
        "format",
        "field",
        "dtype",
        "end_of_text",
        "mix",
        "tokenizer_sha256",
        "template",
        "template_sha256",
        "loss_on",
        "packing",
    }
)
"""Fields of a corpus that a written plan leaves out where they are null."""


class TextSource(Frozen):
    """Where text or tokens are read."""

    source: str = Field(
        "stdlib", description="stdlib = the Python standard library's sources, or a file or folder."
    )
    format: CorpusFormat | None = Field(
        None,
        description="How the source is read; default by its suffix, of JSONL by its first row.",
    )
    field: str | None = Field(
        None, description="Field of each JSONL row, or column of a Parquet file; default text."
    )
    dtype: TokenDtype | None = Field(
        None, description="Type of raw tokens, where the suffix does not say it (.u16, .u32, ..)."
    )

    @model_serializer(mode="wrap")
    def _without_unset(self, written: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without the fields that only some sources have, so that other plans do not list them."""
        found: dict[str, Any] = written(self)
        left_out = {"source"} if found.get("mix") else set()
        left_out |= {name for name in WRITTEN_IF_SET if found.get(name) is None}
        left_out |= set() if found.get("separate_documents") else {"separate_documents"}
        return {name: value for name, value in found.items() if name not in left_out}


class WeightedSource(TextSource):
    """One source of a mixture."""

    source: str = Field(description="A file or folder, or stdlib.")
    weight: SourceWeight = Field(description="Its share of the samples, relative to the others.")
    sha256: str | None = Field(
        None, description="Hash of its content; filled when a plan is resolved."
    )


class Corpus(TextSource):
    """The text that is trained on."""

    tokenizer: str = Field(
        "bytes",
        description="bytes, bpe = a BPE of the model's vocabulary trained on the text, a "
        "tokenizer.json, or a GGUF file.",
    )
    end_of_text: str | None = Field(
        None, description="Token after each document; default the one that the tokenizer names."
    )
    separate_documents: bool = Field(
        False, description="Tokens attend to their own document only; its last token has no target."
    )
    template: str | None = Field(
        None, description="File with a chat template (jinja2), in place of the tokenizer's own."
    )
    loss_on: Literal["answers", "all"] | None = Field(
        None, description="Tokens of a conversation that have loss; default answers."
    )
    packing: bool | None = Field(
        None,
        description="Several conversations a sequence, separate; default true, preferences: false.",
    )
    holdout: float = Field(
        0.05,
        ge=0,
        lt=1,
        description="Last share of the text, or of conversations, kept for evaluation.",
    )
    mix: Annotated[list[WeightedSource], Field(min_length=1)] | None = Field(
        None, description="Sources by weight, in place of `source`."
    )
    sha256: str | None = Field(
        None, description="Hash of the text; filled when a plan is resolved."
    )
    tokenizer_sha256: str | None = Field(
        None, description="Hash of that file; filled when a plan is resolved."
    )
    template_sha256: str | None = Field(
        None, description="Hash of that file; filled when a plan is resolved."
    )

    @model_validator(mode="after")
    def _one_way_to_name_text(self) -> Corpus:
        if self.mix is None:
            return self
        alone = sorted({"source", "format", "field", "dtype"} & self.model_fields_set)
        if alone:
            raise ValueError(f"has mix and {', '.join(alone)}; legal: mix, or one source")
        if not sum(part.weight for part in self.mix) > 0:
            raise ValueError("has a mix whose weights sum to 0; legal: a weight above 0")
        return self


class Checkpoint(Frozen):
    """What is saved, and what is loaded at the start."""

    every: StepsOrNever = Field(
        0, description="Steps between checkpoints; 0: none, but the last step of fine-tuning."
    )
    keep: Annotated[PositiveInt, KEPT] = Field(2, description="Checkpoints kept.")
    load: str | None = Field(
        None,
        description="Checkpoint, or folder of Hugging Face weights with fresh optimizer state, to "
        "start from.",
    )
    new_corpus: bool = Field(
        False,
        description="Go on from a checkpoint that was trained on another corpus, at its sample.",
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
