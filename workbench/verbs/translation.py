"""Verbs that read and write configurations of other frameworks, and launch files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.verbs.planning import given_plan

if TYPE_CHECKING:
    from workbench.interop import Format, Imported, Translation
    from workbench.plan.schema import Plan


def export(plan: Plan | str | Path, folder: str | Path) -> list[Path]:
    """Export a plan with what launches it, by accelerate or Slurm.

    Writes the resolved plan.yaml, accelerate.yaml, launch.sh and job.sbatch.

    Args:
        plan: A plan, or the path of a plan file.
        folder: Folder to write into.

    Returns:
        The files written.

    Raises:
        PlanError: The plan is illegal, or the folder cannot be written.
    """
    from workbench.interop.export import export

    return export(given_plan(plan), folder)


def import_config(
    path: str | Path,
    *,
    model: str | None = None,
    gpu: str | None = None,
    gpus: int | None = None,
    vocab_size: int | None = None,
    set: Mapping[str, Any] | None = None,
    lenient: bool = False,
    config: str | None = None,
) -> Imported:
    """Import a DeepSpeed, Megatron-LM, Trainer or other config.

    The format is found by the content. What could not be translated is listed key by key.

    Args:
        path: ds_config.json, Megatron-LM arguments or script, torchtitan TOML or Python, accelerate
            or gpt-neox YAML, arguments of Hugging Face's Trainer or TRL, LLaMA-Factory or axolotl
            YAML.
        model: Model, where the file does not say it.
        gpu: GPU, where the file does not say it.
        gpus: GPUs of the whole job, where the file does not say it.
        vocab_size: Vocabulary, where Megatron-LM arguments leave it to the tokenizer.
        set: Fields of the plan by dotted path, above what the file says.
        lenient: List keys that the format does not have, instead of refusing them.
        config: Function of a torchtitan Python file that returns the configuration, of several.

    Raises:
        PlanError: The file cannot be read, or no key of it was used.
    """
    from workbench import interop

    given = {"model": model, "gpu": gpu, "gpus": gpus, "vocab_size": vocab_size, "set": set}
    return interop.load(path, **given, lenient=lenient, config=config)


def translate(
    plan: Plan | str | Path, format: Format, framework_version: str | None = None
) -> Translation:
    """Translate a plan into another framework's configuration.

    What that configuration cannot hold is listed field by field.

    Args:
        plan: A plan, or the path of a plan file.
        format: deepspeed, megatron, torchtitan or fsdp.
        framework_version: Release of torchtitan that is to read it, 0.1.0 to 0.3.0; default the
            newest.

    Raises:
        PlanError: The plan is illegal, or nothing in that format comes near it.
    """
    from workbench import interop

    return interop.write(given_plan(plan), format, framework_version)
