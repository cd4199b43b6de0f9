"""Checkpoints without torch: which one to go on from, whether its manifest is whole, and whether a plan fits it."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from workbench.plan.errors import PlanError, Problem, refuse
from workbench.plan.schema import Plan, PythonModel
from workbench.plan.shape import Shape
from workbench.runs.reader import Reader

MANIFEST = "manifest.json"
"""What every whole checkpoint holds; written last."""
CONFIG = "config.json"
"""What a folder of weights under Hugging Face's names holds beside them."""
STEP = re.compile(r"step-(\d{8})")
VERSION = 2
REMEDY = "take another checkpoint (checkpoint.load)"
UNSEEN = {"name", "max_positions", "moe.capacity", "moe.auxiliary_loss"}
"""Fields of a shape that change neither a weight nor what it computes, training aside."""


def saved(folder: Path) -> list[Path]:
    """Whole checkpoints that still exist of the run in `folder`, earliest first: a rank reports one when it is done."""
    paths = [Path(record["path"]) for record in Reader(folder).poll() if record["kind"] == "checkpoint"]
    found = dict.fromkeys(folder / "checkpoints" / path.name for path in paths)
    return sorted(path for path in found if path.is_dir())


def checkpoint_of(source: str | Path, field: str = "resume") -> Path:
    """The checkpoint meant by `source`: a checkpoint itself, or the latest of a run directory.

    Raises `PlanError`, naming `field`, where there is none.
    """
    path = Path(source).absolute()
    if not (path / "state.json").is_file():
        if (path / MANIFEST).is_file():
            return path
        why = "is neither run nor checkpoint" if path.exists() else "does not exist"
        raise refuse(field, f"{path} {why}; legal: a run directory, or one of its checkpoints")
    found = saved(path)
    if not found:
        raise refuse(field, f"{path} holds no checkpoint; set checkpoint.every, or stop a run with a checkpoint")
    return found[-1]


def is_foreign(folder: Path) -> bool:
    """Whether the folder holds a model's weights as Hugging Face keeps them, instead of a checkpoint of ours."""
    return (folder / CONFIG).is_file() and not (folder / MANIFEST).is_file()


def manifest_text(body: dict[str, Any]) -> str:
    """The manifest's content: `body` (version, meta, files) and a checksum of it."""
    plain = json.loads(json.dumps(body))
    return json.dumps({**plain, "sha256": _digest(plain)})


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint: `meta`, and `files` with their tensors. ValueError where it is not whole."""
    path = folder / MANIFEST
    try:
        text = path.read_text()
        manifest = json.loads(text)
        body: dict[str, Any] = {key: value for key, value in manifest.items() if key != "sha256"}
        whole = text == manifest_text(body)
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f"{folder} is not a finished checkpoint: it has no {MANIFEST}; {REMEDY}") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}; {REMEDY}") from None
    except (ValueError, AttributeError, RecursionError):
        whole = False
    if not whole:
        raise ValueError(f"{path} is damaged: its content does not match its checksum; {REMEDY}")
    if body.get("version") != VERSION:
        raise ValueError(f"{path} is of version {body.get('version')}, this one reads version {VERSION}; {REMEDY}")
    return body


def refuse_resized(path: Path, size: int) -> None:
    """ValueError where a checkpoint's file is missing, or has not the `size` that its manifest says."""
    try:
        now = path.stat().st_size
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}; {REMEDY}") from None
    if now != size:
        raise ValueError(f"{path} is damaged: {now} bytes instead of {size}; {REMEDY}")


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def meta_of(plan: Plan, step: int) -> dict[str, Any]:
    """What a checkpoint says of the run: enough to refuse another model, and to find the sampler's place."""
    return {
        "plan": plan.name,
        "world_size": plan.world_size,
        "step": step,
        "sample_index": step * plan.training.global_batch,
        "model": plan.model.model_dump() if isinstance(plan.model, Shape | PythonModel) else plan.model,
        "precision": plan.strategy.precision,
        "optimizer": plan.training.optimizer.name,
    }


def steps_done(folder: Path, meta: dict[str, Any], plan: Plan) -> int:
    """Steps that a checkpoint of `meta` stands for in a complete `plan`.

    Raises `PlanError`, field by field, where it is of another model, precision or optimizer, or where the sampler's
    place does not fall between two of the plan's steps.
    """
    found = _differing(folder, meta, plan)
    batch, samples = plan.training.global_batch, int(meta["sample_index"])
    steps, rest = divmod(samples, batch)
    if rest:
        message = f"is {batch}, but {folder} stands at sample {samples}, which is not between two of its steps"
        found.append(Problem("training.global_batch", f"{message}; legal: a divisor of {samples}"))
    if found:
        raise PlanError(found)
    return steps


def _differing(folder: Path, meta: dict[str, Any], plan: Plan) -> list[Problem]:
    found = _model_problems(folder, meta["model"], plan)
    for field, theirs, mine in (
        ("strategy.precision", meta["precision"], plan.strategy.precision),
        ("training.optimizer.name", meta["optimizer"], plan.training.optimizer.name),
    ):
        if theirs != mine:
            how = f"set it to {theirs!r}, or start from weights alone (`workbench weights`)"
            found.append(Problem(field, f"is {mine!r}, {folder} was written with {theirs!r}; {how}"))
    return found


def shape_of(folder: Path, meta: dict[str, Any]) -> Shape:
    """The shape of a checkpoint's model. ValueError where that is code, which has none."""
    if "python" in meta["model"]:
        raise ValueError(f"{folder} is of the model '{meta['model']['python']}', which is code and has no shape")
    return Shape.model_validate(meta["model"])


def _model_problems(folder: Path, theirs: dict[str, Any], plan: Plan) -> list[Problem]:
    where = f"{folder} is of another model: there it"
    if "python" not in theirs and isinstance(plan.model, Shape):
        return shape_problems(where, Shape.model_validate(theirs), plan.model)
    mine = plan.model.python if isinstance(plan.model, PythonModel) else plan.shape.name
    other = theirs.get("python", theirs.get("name"))
    return [] if mine == other else [Problem("model", f"is {mine!r}; {where} is {other!r}; give the plan that model")]


def shape_problems(where: str, theirs: Shape, mine: Shape) -> list[Problem]:
    """Where the plan's shape is not that of the weights; `where` begins what is said of theirs."""
    ours, others = _flat(mine), _flat(theirs)
    if mine.positions == "learned" or theirs.positions == "learned":
        ours["max_positions"], others["max_positions"] = mine.max_positions, theirs.max_positions
    return [
        Problem(f"model.{field}", f"is {ours.get(field)!r}; {where} is {others.get(field)!r}; give the plan that model")
        for field in dict.fromkeys((*ours, *others))
        if ours.get(field) != others.get(field)
    ]


def _flat(shape: Shape) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for field, value in shape.model_dump().items():
        inner = {f"{field}.{key}": each for key, each in value.items()} if isinstance(value, dict) else {field: value}
        flat |= inner
    return {field: value for field, value in flat.items() if field not in UNSEEN}
