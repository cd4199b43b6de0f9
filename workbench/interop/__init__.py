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
from workbench.interop.torchtitan import read_torchtitan, torchtitan_keys
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
from workbench.untrusted_text import shown

__all__ = [
    "FORMATS",
    "TITLES",
    "VERSIONS",
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
VERSIONS: dict[Format, tuple[str, ...]] = {"torchtitan": torchtitan_keys.VERSIONS}
"""Format -> versions of the framework whose files differ, oldest first."""
_WRITERS: dict[Format, Callable[..., Translation]] = {
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
    config: str | None = None,
) -> Imported:
    """The plan that foreign `text` means, with its keys that no plan can say and the fields that it
    left open.

    `format` is found by the content where it is None. `model`, `gpu`, `gpus` and `vocab_size` are
    what the text lacks; `set` gives fields of the plan by dotted path, above what the text says;
    `folder` holds files that it names, and `config` is the one of several configurations in a
    Python file. Keys that the format does not have are refused, or with
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
    if config is not None and format != "torchtitan":
        raise refuse("config", f"is for Python with several; {TITLES[format]} hold one")
    sets = dict(set or {})
    beside = (
        model or sets.get("model"),
        gpu or sets.get("cluster.gpu"),
        gpus or sets.get("cluster.gpus"),
    )
    reader = _READERS[format]
    return ask_for_missing(
        lambda given: reader(text, given, lenient),
        ImportOptions(*beside, sets=sets, vocab_size=vocab_size, folder=folder, config=config),
    )


def load(path: str | Path, **given: Any) -> Imported:
    """`read` of the file `path`. Raises `PlanError` where it cannot be read."""
    path = Path(path)
    try:
        text = read_some(path, MOST)
    except (OSError, UnicodeDecodeError) as error:
        raise refuse(str(path), f"cannot be read: {unread(error)}") from None
    return read(text.removeprefix("\ufeff"), folder=path.parent, **given)


def write(plan: Plan, format: Format, version: str | None = None) -> Translation:
    """`plan` in a foreign `format`, and its fields that the text does not say; `version` of the
    framework, default the newest of `VERSIONS`. Raises `PlanError`.
    """
    if format not in FORMATS:
        raise refuse("format", f"is '{format}'; legal: {', '.join(FORMATS)}")
    legal = VERSIONS.get(format, ())
    if version is not None and version not in legal:
        words = ", ".join(legal) or f"none, as {TITLES[format]} are the same for all that read them"
        raise refuse("framework_version", f"is {shown(version)}; legal: {words}")
    if replicas := plan.strategy.pipeline.replicas:
        raise refuse(
            "strategy.pipeline.replicas",
            f"is {replicas}, which cannot be written as {TITLES[format]}; legal: null",
        )
    return _WRITERS[format](plan, *([] if version is None else [version]))
