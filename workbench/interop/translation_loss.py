"""What of a plan a foreign text does not say, found by reading the text back: nothing can be lost
unseen.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from workbench.errors import PlanError, Problem
from workbench.interop.foreign_keys import flat
from workbench.interop.translation import ASSUMED, TITLES, Format, Imported, KeyNote, as_said
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.schema import Plan, Training, build_plan, written_fields

UNSAID = ("version", "strategy.preset", "strategy.stack", "corpus.sha256")
"""Fields that are no loss: a preset is written out, the framework profile is the format's own."""
ALWAYS = (
    "model",
    "cluster.gpu",
    "cluster.gpus",
    *(f"training.{field}" for field in ("sequence_length", "steps", "global_batch", "micro_batch")),
)
"""Fields that matter whatever their value: named even where it is the default."""

PARTITION, STAGES, CHUNKS = (
    f"strategy.pipeline.{field}" for field in ("partition", "size", "chunks")
)


@contextmanager
def nearest(format: Format) -> Iterator[None]:
    """Reading back what was just written: where it is illegal, the plan has nothing near it in this
    format.
    """
    try:
        yield
    except PlanError as error:
        why = f"cannot be written as {TITLES[format]}; the nearest that it can say is illegal: "
        raise PlanError(
            [
                Problem(
                    p.field, why + p.message.removesuffix(ASSUMED).removesuffix(as_said(format))
                )
                for p in error.problems
            ]
        ) from None


def lost(
    plan: Plan, full: ResolvedPlan, back: Imported, whys: Mapping[str, str], handed: Collection[str]
) -> list[KeyNote]:
    """Fields of `full` (the complete `plan`) that the text read `back` does not hold, each with its
    value and why.

    Named are fields that read back otherwise, and fields that the reader did not get from the text
    (it assumed them, left them alone, or had them `handed` to it) and that the plan sets, or that
    matter always. `whys` maps a field, or the beginning of fields, to the reason.
    """
    whys = {"cluster.gpu": "no foreign file names the GPU", **whys}
    assumed = {note.field for note in back.assumed}
    ours, theirs, read = _leaves(full), _leaves(back.plan.resolve()), _leaves(back.plan)
    written, default = _leaves(plan), _defaults(full)
    found: dict[str, KeyNote] = {}
    for field in dict.fromkeys([*ours, *theirs]):
        value, name = ours.get(field), _group(field, "model" in handed)
        changed = name == PARTITION and bool({STAGES, CHUNKS} & set(found))
        follows = changed and field not in written and _is_even(value)
        in_mixture = field == "corpus.source" and field not in ours
        if name in UNSAID or name in found or follows or in_mixture:
            continue
        differs = not _same(field, value, theirs.get(field), full, field in written)
        said = field in read and field not in assumed and not _among(field, handed)
        if differs or (not said and _matters(name, field, value, written, default)):
            reason = _reason(name, whys, differs and said, theirs.get(field))
            reason += "; here it decides nothing" * (differs and _idle(field, full))
            found[name] = KeyNote(name, _value(name, full, value), reason)
    return list(found.values())


def _is_even(partition: Any) -> bool:
    """True where layers a stage follow from the number of stages, each having as many."""
    return not isinstance(partition, list) or len(set(partition)) <= 1


def _leaves(plan: Plan) -> dict[str, Any]:
    data = written_fields(plan)
    for section in ("model", "cluster.gpu"):
        *above, last = section.split(".")
        holder = data[above[0]] if above else data
        if not isinstance(holder[last], Mapping):
            holder[last] = {"name": holder[last]}
    if (tune := data.pop("finetune", None)) is not None:
        # Other formats know what every training has, under the names that it has there.
        data["training"] = {name: tune.pop(name) for name in Training.model_fields if name in tune}
        data["finetune"] = tune
    return flat(data)


def _defaults(full: ResolvedPlan) -> dict[str, Any]:
    bare = build_plan(
        {"model": full.shape.model_dump(), "cluster": {"gpu": full.gpu.model_dump(), "gpus": 1}}
    )
    return flat(bare.model_dump())


def _group(field: str, whole_model: bool) -> str:
    """The field as people know it: a GPU, a fabric, and a model that is one name, in one word."""
    sections: list[str] = ["cluster.gpu", "cluster.fabric", *(["model"] if whole_model else [])]
    for section in sections:
        if field == section or field.startswith(section + "."):
            return section
    return field


def _value(name: str, full: ResolvedPlan, value: Any) -> Any:
    known = {
        "model": full.shape.name,
        "cluster.gpu": full.gpu.name,
        "cluster.fabric": full.fabric.name,
    }
    return known.get(name, value)


def _matters(
    name: str, field: str, value: Any, written: Mapping[str, Any], default: Mapping[str, Any]
) -> bool:
    if name in ("cluster.fabric", "cluster.nodes", "cluster.gpus_per_node", "name"):
        return any(key == name or key.startswith(name + ".") for key in written)
    if field in (PARTITION, "strategy.attention", "strategy.loss"):
        return False  # always filled; where it matters it reads back otherwise
    return (
        name in ALWAYS
        or (field in written and value is not None)
        or value != default.get(field, value)
    )


def _same(field: str, ours: Any, theirs: Any, full: ResolvedPlan, written: bool) -> bool:
    """Whether a field came back; one that nobody has `written` may differ where it decides
    nothing.
    """
    if field == "name" or field.startswith(("cluster.gpu.", "cluster.fabric")):
        return True  # handed to the reader as they are
    if field == "strategy.attention" and not written:
        return True  # each framework has its own
    if field == "strategy.placement" and not written:
        many = [axis for axis, size in full.sizes.items() if size > 1]
        return [a for a in ours if a in many] == [a for a in theirs if a in many]
    if not written and _idle(field, full):
        return True
    if field == "strategy.expert.tensor":
        return (ours or full.sizes["tensor"]) == (theirs or full.sizes["tensor"])
    if isinstance(ours, float) and isinstance(theirs, float):
        return math.isclose(ours, theirs, rel_tol=1e-12)
    return bool(ours == theirs)


def _idle(field: str, full: ResolvedPlan) -> bool:
    """Whether a field means nothing in this plan: how an axis of one rank is split."""
    s, sizes = full.strategy, full.sizes
    o = full.training.optimizer
    idle = {
        "strategy.context.algorithm": sizes["context"] == 1,
        "strategy.tensor.sequence": sizes["tensor"] == 1,
        "strategy.pipeline.schedule": sizes["pipeline"] == 1 and s.pipeline.chunks == 1,
        "strategy.data.reduce": sizes["data"] * sizes["context"] == 1,
        "strategy.data.overlap": sizes["data"] * sizes["context"] == 1,
        "strategy.data.bucket_mib": sizes["data"] * sizes["context"] == 1,
        "training.evaluation.batches": full.training.evaluation.every == 0,
        "training.optimizer.final_ratio": o.decay == "constant",
        "training.optimizer.beta2": o.name == "sgd",
        "training.optimizer.epsilon": o.name == "sgd",
    }
    return idle.get(field, False)


def _among(name: str, words: Collection[str]) -> bool:
    return any(name == word or name.startswith(word + ".") for word in words)


def _reason(name: str, whys: Mapping[str, str], said: bool, theirs: Any) -> str:
    best = max((word for word in whys if _among(name, (word,))), key=len, default=None)
    why = "the format has no word for it" if best is None else whys[best]
    if best is None and said:
        why = "the format cannot say this value"
    return f"{why}; the file means {theirs}" if said else why
