"""Configurations of other software, in and out: read as a plan, or written from one, with what was
lost named.

A format is one file: `deepspeed`, `megatron`, `torchtitan`, `fsdp`, each with `read` and `write`;
gpt-neox's YAML and the arguments of trainers (`hf-trainer`, `llama-factory`, `axolotl`) are read
only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from workbench.errors import refuse
from workbench.interop.accelerate import read_accelerate, read_fsdp
from workbench.interop.deepspeed import read_deepspeed
from workbench.interop.format_marks import detect
from workbench.interop.gpt_neox import read_gpt_neox
from workbench.interop.megatron import read_megatron
from workbench.interop.missing_fields import ask_for_missing
from workbench.interop.torchtitan import read_torchtitan
from workbench.interop.trainer import read_trainer
from workbench.interop.translation import (
    FORMATS,
    SOURCES,
    TITLES,
    Format,
    Imported,
    ImportOptions,
    KeyNote,
    Source,
    Translation,
)
from workbench.machine.hardware import GPU
from workbench.plan.model.model_shape import Shape
from workbench.plan.schema import Plan
from workbench.safe_io.files import read_some, unread

__all__ = [
    "FORMATS",
    "TITLES",
    "Format",
    "ImportOptions",
    "Imported",
    "KeyNote",
    "Translation",
    "detect",
    "load",
    "read",
    "write",
]

MOST = 4 * 2**20
"""Bytes of the largest file that is read: no configuration is near it."""

_READERS: dict[Source, Callable[..., Imported]] = {
    "deepspeed": read_deepspeed.read,
    "megatron": read_megatron.read,
    "torchtitan": read_torchtitan.read,
    "fsdp": read_accelerate.read,
    "gpt-neox": read_gpt_neox.read,
    "hf-trainer": read_trainer.read_hf_trainer,
    "llama-factory": read_trainer.read_llama_factory,
    "axolotl": read_trainer.read_axolotl,
}
_WRITERS: dict[Format, Callable[[Plan], Translation]] = {
    "deepspeed": read_deepspeed.write,
    "megatron": read_megatron.write,
    "torchtitan": read_torchtitan.write,
    "fsdp": read_fsdp.write,
}


def read(
    text: str,
    format: Source | None = None,
    *,
    model: str | Shape | None = None,
    gpu: str | GPU | None = None,
    gpus: int | None = None,
    vocab_size: int | None = None,
    set: Mapping[str, Any] | None = None,
    lenient: bool = False,
    folder: Path | None = None,
) -> Imported:
    """The plan that foreign `text` means, with its keys that no plan can say and the fields that it
    left open.

    `format` is found by the content where it is None. `model`, `gpu`, `gpus` and `vocab_size` are
    what the text lacks; `set` gives fields of the plan by dotted path, above what the text says;
    `folder` holds files that it names. Keys that the format does not have are refused, or with
    `lenient` listed with the untranslated. Raises `PlanError`, also where no key of the text was
    used.
    """
    if format is not None and format not in SOURCES:
        raise refuse("format", f"is '{format}'; legal: {', '.join(SOURCES)}")
    format = format or detect(text)
    if vocab_size is not None and format not in ("megatron", "gpt-neox"):
        raise refuse(
            "vocab_size",
            f"is for arguments that hold a shape and no vocabulary, and {TITLES[format]} hold "
            "none; give model (--model)",
        )
    sets = dict(set or {})
    beside = (
        model or sets.get("model"),
        gpu or sets.get("cluster.gpu"),
        gpus or sets.get("cluster.gpus"),
    )
    reader = _READERS[format]
    return ask_for_missing(
        lambda given: reader(text, given, lenient),
        ImportOptions(*beside, sets=sets, vocab_size=vocab_size, folder=folder),
    )


def load(path: str | Path, **given: Any) -> Imported:
    """`read` of the file `path`. Raises `PlanError` where it cannot be read."""
    path = Path(path)
    try:
        text = read_some(path, MOST)
    except (OSError, UnicodeDecodeError) as error:
        raise refuse(str(path), f"cannot be read: {unread(error)}") from None
    return read(text.removeprefix("\ufeff"), folder=path.parent, **given)


def write(plan: Plan, format: Format) -> Translation:
    """`plan` in a foreign `format`, and its fields that the text does not say. Raises
    `PlanError`.
    """
    if format not in FORMATS:
        raise refuse("format", f"is '{format}'; legal: {', '.join(FORMATS)}")
    if replicas := plan.strategy.pipeline.replicas:
        raise refuse(
            "strategy.pipeline.replicas",
            f"is {replicas}, which cannot be written as {TITLES[format]}; legal: null",
        )
    return _WRITERS[format](plan)
