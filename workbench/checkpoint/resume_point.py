"""Checks of a plan against the checkpoint that it resumes from, without torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from workbench.checkpoint.manifest import MANIFEST, REMEDY
from workbench.checkpoint.resume_changes import (
    TRAINED_ON,
    TrainedOn,
    corpus_problems,
    shown,
    trained_on,
)
from workbench.errors import PlanError, Problem, refuse
from workbench.plan.model.model_shape import Shape, shape_from
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.rules.task.task_words import in_words_of_task
from workbench.plan.schema import Finetune, Plan, PythonModel
from workbench.safe_io.gguf_files import SUFFIX
from workbench.safe_io.json_field_checks import has, object_, text, whole

CONFIG = "config.json"
"""Configuration in a folder of Hugging Face weights."""
ADAPTER_CONFIG = "adapter_config.json"
"""Configuration in a folder of adapters in PEFT's format."""
STEP = re.compile(r"step-(\d{8})")
LOAD = "checkpoint.load"
TRAINED_FIELDS = {"method", "lora", "adapter", "quantize", "base_sha256"}
"""Fields of `finetune` that say what is trained, and of which base; of one that no file holds its
`seed` says it."""
IRRELEVANT_FIELDS = {"name", "max_positions", "moe.capacity", "moe.auxiliary_loss"}
"""Fields of a shape that change neither a weight nor, but for training, a result."""


def step_folders(folder: Path) -> list[Path]:
    """Folders named as checkpoints, in order of step; links do not count."""
    if folder.is_symlink() or not folder.is_dir():
        return []
    found = (path for path in folder.iterdir() if STEP.fullmatch(path.name))
    return sorted(path for path in found if path.is_dir() and not path.is_symlink())


def finished_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints in a folder, in order of step; links do not count."""
    return [path for path in step_folders(folder) if (path / MANIFEST).is_file()]


def legal_adapters(folder: Path) -> str:
    """What is legal in place of a folder without adapters: those in it, by name, else PEFT's."""
    found = sorted(str(config.parent) for config in folder.glob(f"*/{ADAPTER_CONFIG}"))
    named = " or ".join(f"'{each}'" for each in found)
    return f"legal: {named or f'a folder that holds {ADAPTER_CONFIG}, as PEFT writes it'}"


def is_huggingface_folder(folder: Path) -> bool:
    """Whether the folder holds Hugging Face weights instead of a checkpoint of the workbench."""
    return (folder / CONFIG).is_file() and not (folder / MANIFEST).is_file()


def is_gguf(path: Path) -> bool:
    """Whether the path is that of a GGUF file of weights."""
    return path.suffix == SUFFIX and path.is_file()


@contextmanager
def naming_field(field: str) -> Iterator[None]:
    """A context whose errors about weights name `field` in place of `checkpoint.load`."""
    try:
        yield
    except PlanError as error:
        raise PlanError([with_field(one, field) for one in error.problems]) from None
    except ValueError as error:
        raise ValueError(str(error).replace(LOAD, field)) from None


def with_field(problem: Problem, field: str) -> Problem:
    """`problem` of weights that `field` names, not `checkpoint.load`."""
    return Problem(problem.field.replace(LOAD, field), problem.message.replace(LOAD, field))


def holds_adapters(meta: Mapping[str, Any]) -> bool:
    """Whether a checkpoint of this `meta` holds adapters alone."""
    tune = meta.get("finetune")
    return isinstance(tune, dict) and tune.get("method") == "lora"


def checkpoint_meta(plan: Plan, step: int, on: TrainedOn | None = None) -> dict[str, Any]:
    """`meta` of a checkpoint: identifies the model, precision, optimizer, sample index, and what it
    was trained on (`on`; default what the plan's files hold now); of fine-tuning also what is
    trained, and of which base.
    """
    tune = plan.finetune
    own = {} if tune is None else {"finetune": _trained(tune)}
    return own | {
        TRAINED_ON: (on or trained_on(plan)).model_dump(mode="json"),
        "plan": plan.name,
        "world_size": plan.world_size,
        "step": step,
        "sample_index": step * plan.training.global_batch,
        "model": plan.model.model_dump()
        if isinstance(plan.model, Shape | PythonModel)
        else plan.model,
        "precision": plan.strategy.precision,
        "optimizer": plan.training.optimizer.name,
    }


_META = {"sample_index": whole, "model": object_, "precision": text, "optimizer": text}
"""Entries of `checkpoint_meta` that are read again."""


def _refuse_formless(folder: Path, meta: dict[str, Any]) -> None:
    """ValueError where a manifest's `meta` is not what `checkpoint_meta` gives."""
    if not has(meta, _META):
        raise ValueError(
            f"{folder / MANIFEST} is damaged: its meta does not say {', '.join(_META)}; {REMEDY}"
        )


def steps_done(folder: Path, meta: dict[str, Any], plan: ResolvedPlan) -> int:
    """Steps of `plan` after which training resumes from a checkpoint.

    The global batch may have changed: the sample index decides.

    Args:
        folder: The checkpoint, for messages.
        meta: Its `meta`.
        plan: The plan that resumes.

    Raises:
        PlanError: Names each field of another model, precision or optimizer, or a global batch by
            which the sample index falls within a step.
        ValueError: `meta` is incomplete.
    """
    _refuse_formless(folder, meta)
    found = _differing(folder, meta, plan)
    samples: int = meta["sample_index"]
    batch = plan.training.global_batch
    steps, rest = divmod(samples, batch)
    if rest:
        message = (
            f"is {batch}, but {folder} is at sample {samples}, which is not between two of its "
            f"steps"
        )
        found.append(Problem("training.global_batch", f"{message}; legal: a divisor of {samples}"))
    if found:
        raise PlanError(in_words_of_task(found, plan))
    return steps


def _differing(folder: Path, meta: dict[str, Any], plan: ResolvedPlan) -> list[Problem]:
    found = _model_problems(folder, meta["model"], plan)
    if plan.lora and not meta.get("finetune"):
        why = f"'{folder}' is of training, which has no adapters"
        legal = "a checkpoint of these adapters, or null with this one as finetune.base"
        found.append(Problem(LOAD, f"{why}; legal: {legal}"))
    for field, theirs, mine in (
        ("strategy.precision", meta["precision"], plan.strategy.precision),
        ("training.optimizer.name", meta["optimizer"], plan.training.optimizer.name),
        *_of_finetune(meta.get("finetune", {}), plan),
    ):
        if theirs != mine:
            how = f"set it to {shown(theirs)}, or start from weights alone (`workbench weights`)"
            found.append(
                Problem(
                    field, f"is {shown(mine)}, {folder} was written with {shown(theirs)}; {how}"
                )
            )
    return found + corpus_problems(folder, meta, plan)


def nothing_left(checkpoint: str, steps: int, plan: ResolvedPlan) -> list[Problem]:
    """Problem of a `checkpoint`, in words, that has done a plan's steps; none if some are left."""
    asked = plan.training.steps
    if steps < asked:
        return []
    why = f"is {asked}, and {checkpoint} has done {steps}: nothing is left to train"
    return in_words_of_task([Problem("training.steps", f"{why}; legal: more steps")], plan)


def _of_finetune(theirs: Any, plan: ResolvedPlan) -> Iterator[tuple[str, Any, Any]]:
    """(field, a checkpoint's value, the plan's) of what fine-tuning trains.

    A base without hash is not compared: a plan that is not pinned has none.
    """
    mine = _trained(plan.finetune) if plan.finetune else {}
    theirs = theirs if isinstance(theirs, dict) else {}
    if mine and not theirs:
        return  # training that goes on, or that `_differing` refuses
    given, own = theirs.get("method"), mine.get("method")
    if given != own:  # and so all that follows from it
        yield "finetune.method", given, own
        return
    yield from _of_base(theirs, mine)
    yield "finetune.adapter", theirs.get("adapter"), mine.get("adapter")
    yield from _of_section("quantize", theirs.get("quantize"), mine.get("quantize"))
    adapters, others = mine.get("lora") or {}, theirs.get("lora") or {}
    yield from _of_section("lora", _settings(others), _settings(adapters))
    yield from _of_initial(others, adapters)


def _of_section(name: str, given: Any, own: Any) -> Iterator[tuple[str, Any, Any]]:
    """Each field of a section of `finetune`; of one that is null on a side, what says so."""
    given, own = given or {}, own or {}
    if given and own:
        yield from ((f"finetune.{name}.{field}", given.get(field), own[field]) for field in own)
    elif given:
        first = next(iter(given))
        yield f"finetune.{name}.{first}", given[first], None
    elif own:
        yield f"finetune.{name}", None, next(iter(own.values()))


def _settings(lora: Mapping[str, Any]) -> dict[str, Any]:
    """What adapters are, without those that they began as."""
    return {name: value for name, value in lora.items() if not name.startswith("initial")}


def _of_initial(
    theirs: Mapping[str, Any], mine: Mapping[str, Any]
) -> Iterator[tuple[str, Any, Any]]:
    """The adapters that training began with, which a plan that resumes need not name: its
    checkpoint holds what became of them.
    """
    if mine.get("initial") is None:
        return
    if theirs.get("initial") is None:
        yield "finetune.lora.initial", None, mine["initial"]
    elif None not in (given := theirs.get("initial_sha256"), own := mine.get("initial_sha256")):
        of = "adapters of sha256"
        yield "finetune.lora.initial", f"{of} {given}", f"{of} {own}"


def _of_base(theirs: Mapping[str, Any], mine: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    if None not in (given := theirs.get("seed"), own := mine.get("seed")):
        yield "finetune.seed", given, own
        return
    given, own = _base_text(theirs), _base_text(mine)
    if None not in (given, own):
        yield "finetune.base", given, own


def _base_text(trained: Mapping[str, Any]) -> str | None:
    if trained.get("base_sha256") is not None:
        return f"weights of sha256 {trained['base_sha256']}"
    return None if trained.get("seed") is None else f"null, drawn by seed {trained['seed']}"


def _trained(tune: Finetune) -> dict[str, Any]:
    """What `tune` trains, as plain data, with the seed of a base that a run draws again."""
    drawn = tune.base is None and (tune.method == "lora" or tune.preference is not None)
    return tune.model_dump(include=TRAINED_FIELDS | ({"seed"} if drawn else set()))


def checkpoint_shape(folder: Path, meta: dict[str, Any]) -> Shape:
    """The shape of a checkpoint's model.

    Raises:
        ValueError: It is a Python model, which has none.
    """
    _refuse_formless(folder, meta)
    if "python" in meta["model"]:
        raise ValueError(
            f"{folder} is of the Python model '{meta['model']['python']}', which has no shape"
        )
    return _shape(folder, meta["model"])


def _shape(folder: Path, written: Any) -> Shape:
    try:
        return shape_from(written)
    except PlanError as error:
        raise ValueError(f"{folder} has a damaged manifest: model.{error.first}") from None


def _model_problems(folder: Path, theirs: dict[str, Any], plan: ResolvedPlan) -> list[Problem]:
    where = f"{folder} is of another model: there it"
    if "python" not in theirs and isinstance(plan.model, Shape):
        return shape_problems(where, _shape(folder, theirs), plan.model)
    mine = plan.model.python if isinstance(plan.model, PythonModel) else plan.shape.name
    other = theirs.get("python", theirs.get("name"))
    return (
        []
        if mine == other
        else [Problem("model", f"is {mine!r}; {where} is {other!r}; give the plan that model")]
    )


def refuse_other_model(field: str, path: Path, theirs: Shape, shape: Shape) -> None:
    """Check that weights are of the plan's model.

    Args:
        field: Field of the plan that errors name.
        path: The file that describes theirs.
        theirs: The model of the weights.
        shape: The plan's model.

    Raises:
        PlanError: A shape does not describe their model, or names every field that differs.
    """
    if theirs.unmodelled:
        raise refuse(
            field,
            f"'{path}' has {theirs.unmodelled}; weights are read only of models that the fields "
            "of a plan's model describe completely",
        )
    if problems := shape_problems(f"in {path} it", theirs, shape):
        raise PlanError(problems)


def shape_problems(where: str, theirs: Shape, mine: Shape) -> list[Problem]:
    """Problems of a plan's shape that is not the weights'; `where` starts the text on theirs."""
    ours, others = _flat(mine), _flat(theirs)
    if mine.positions == "learned" or theirs.positions == "learned":
        ours["max_positions"], others["max_positions"] = mine.max_positions, theirs.max_positions
    return [
        Problem(
            f"model.{field}",
            f"is {ours.get(field)!r}; {where} is {others.get(field)!r}; give the plan that model",
        )
        for field in dict.fromkeys((*ours, *others))
        if ours.get(field) != others.get(field)
    ]


def _flat(shape: Shape) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for field, value in shape.model_dump().items():
        inner = (
            {f"{field}.{key}": each for key, each in value.items()}
            if isinstance(value, dict)
            else {field: value}
        )
        flat |= inner
    return {field: value for field, value in flat.items() if field not in IRRELEVANT_FIELDS}
