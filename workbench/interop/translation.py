"""What foreign formats share: their names, what an import and a translation say, what is given
beside a file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from workbench.errors import PlanError, Problem, refuse
from workbench.machine import gpu_catalog
from workbench.machine.hardware import GPU, Fabric
from workbench.plan.catalog import catalog
from workbench.plan.model.model_shape import Shape
from workbench.plan.plan_data import changed
from workbench.plan.schema import Plan, build_plan
from workbench.untrusted_text import escaped

if TYPE_CHECKING:
    from workbench.interop.foreign_keys import ForeignKeys

Format = Literal["deepspeed", "megatron", "torchtitan", "fsdp"]
FORMATS: tuple[Format, ...] = get_args(Format)
"""Foreign formats that are read and written, by name."""
Source = Literal[
    "deepspeed",
    "megatron",
    "torchtitan",
    "fsdp",
    "gpt-neox",
    "hf-trainer",
    "llama-factory",
    "axolotl",
]
SOURCES: tuple[Source, ...] = get_args(Source)
"""Foreign formats that are read."""

FRAMEWORK_PROFILES: dict[Format, str] = {
    "deepspeed": "deepspeed-zero",
    "megatron": "megatron",
    "torchtitan": "torchtitan",
    "fsdp": "fsdp",
}
"""Format -> `strategy.stack` of what is imported, the framework of data/frameworks/ that
runs it.
"""
PIPED = "deepspeed-3d"
"""The profile of a ds_config.json with pipeline stages."""

TITLES: dict[Source, str] = {
    "deepspeed": "DeepSpeed ds_config.json",
    "megatron": "Megatron-LM arguments",
    "torchtitan": "torchtitan job",
    "fsdp": "accelerate YAML",
    "gpt-neox": "gpt-neox YAML",
    "hf-trainer": "Hugging Face TrainingArguments (Trainer, TRL)",
    "llama-factory": "LLaMA-Factory YAML",
    "axolotl": "axolotl YAML",
}

MARKS: dict[Source, str] = {
    "deepspeed": "train_batch_size, zero_optimization",
    "megatron": "--num-layers",
    "torchtitan": "[parallelism]",
    "fsdp": "distributed_type",
    "gpt-neox": "pipe_parallel_size",
    "hf-trainer": "per_device_train_batch_size",
    "llama-factory": "finetuning_type",
    "axolotl": "base_model, sequence_len",
}
"""Format -> keys that show it."""


@dataclass(frozen=True)
class KeyNote:
    """One key or field, its value, and why it was left out or taken so."""

    field: str
    value: Any
    why: str


@dataclass(frozen=True)
class Imported:
    """A plan that a foreign file means, and what became of everything else in the file.

    Whatever stands in the file is in one of these lists: used (`translated`), a key of the format
    that the plan does not hold (`untranslated`), no key of the format at all (`unknown`), or no
    part of the configuration (`ignored`).
    """

    format: Source
    plan: Plan
    translated: list[str]
    """Keys of the file that the plan holds."""
    untranslated: list[KeyNote]
    """Keys of the file that a plan cannot say, with their values; those that are `unknown` stand
    here too.
    """
    assumed: list[KeyNote]
    """Fields of the plan that the file does not say, with the value taken and whose default it is.
    """
    ignored: list[KeyNote] = field(default_factory=list)
    """What stands in the file and is no part of the configuration (comments, other commands), or
    was overridden.
    """
    unknown: list[KeyNote] = field(default_factory=list)
    """Keys that the format does not have, where the file was read leniently."""

    def tables(self) -> list[tuple[str, str, list[KeyNote]]]:
        """(title, what a row is about, rows) of each list that is shown beside the plan."""
        unknown = [note.field for note in self.unknown]
        known = [note for note in self.untranslated if note.field not in unknown]
        found = [
            ("Not translated: what the file says and a plan cannot", "key", known),
            ("Assumed: what the file does not say", "field", self.assumed),
        ]
        more = [
            ("Unknown: keys that the format does not have", "key", self.unknown),
            ("Ignored: no part of the configuration", "what", self.ignored),
        ]
        return found + [table for table in more if table[2]]

    def _repr_html_(self) -> str:
        shown = (notes_html(title.partition(":")[0], notes) for title, _, notes in self.tables())
        return self.plan._repr_html_() + "".join(shown)


class Translation(NamedTuple):
    """A plan in a foreign format, and the fields of the plan that the text does not say."""

    text: str
    untranslated: list[KeyNote]

    def _repr_html_(self) -> str:
        return f"<pre>{escaped(self.text)}</pre>" + notes_html("Not translated", self.untranslated)


def notes_html(title: str, notes: Sequence[KeyNote]) -> str:
    """The notes as an HTML table; a line that says so where there are none."""
    if not notes:
        return f"<p>{title}: nothing</p>"
    cells = (
        f"<td>{escaped(n.field)}</td><td>{escaped(str(n.value))}</td><td>{escaped(n.why)}</td>"
        for n in notes
    )
    return f"<p>{title}</p><table>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"


WORLDS = tuple(odd * 2**power for odd in (1, 3, 5, 7) for power in range(13))
"""Numbers of ranks that stand in for one that is lacking: one of them divides whatever is split."""


STAND_IN = {"model": "llama-3-8b"}
"""The model that stands in for one that is lacking."""


class MissingField(PlanError):
    """A refusal because something is neither in the file nor given; `stand_ins` would let a reader
    go on.
    """

    def __init__(self, problems: Sequence[Problem], stand_ins: Sequence[Mapping[str, Any]]) -> None:
        super().__init__(problems)
        self.stand_ins = stand_ins


def lacks(field: str, message: str, *stand_ins: Mapping[str, Any]) -> MissingField:
    """A `MissingField` of one problem, to be raised; a stand-in is a field of `ImportOptions`, or
    of the plan by dotted path.
    """
    return MissingField([Problem(field, message)], stand_ins)


@dataclass(frozen=True)
class ImportOptions:
    """What stands beside a foreign file that lacks it: a model, a GPU, how many GPUs. None: the
    file says it.

    `sets` are fields of the plan by dotted path, above whatever the file says.
    """

    model: str | Shape | None = None
    gpu: str | GPU | None = None
    gpus: int | None = None
    fabric: str | Fabric | None = field(default=None)
    sets: Mapping[str, Any] = field(default_factory=dict)
    vocab_size: int | None = None
    folder: Path | None = None
    """Where the file stands, and with it those that it names."""
    config: str | None = None
    """The one of several configurations that a file holds."""

    def world(self, found: int | None, key: str) -> int:
        """Ranks of the job: `found` in the file at `key`, or given. Raises `PlanError` if neither
        or both differ.
        """
        if self.gpus is not None and (not isinstance(self.gpus, int) or self.gpus < 1):
            raise refuse("gpus", f"is {self.gpus!r}; legal: 1 or more")
        if found is not None and self.gpus not in (None, found):
            raise refuse(
                "gpus",
                f"is {self.gpus}, but the file says {found} ({key}); legal: {found}, or leave it "
                f"out; "
                "--set cluster.gpus=N stands above the file",
            )
        world = self.gpus if found is None else found
        if world is None:
            raise lacks(
                "gpus",
                f"the file does not say how many GPUs ({key}); give gpus (--gpus), e.g. 8",
                *({"gpus": ranks} for ranks in WORLDS),
            )
        return world

    def gpu_given(self) -> str | dict[str, Any]:
        """The GPU, which no foreign file says. Raises `PlanError` naming what to give."""
        if self.gpu is None:
            raise MissingField([self.no_gpu()], [{"gpu": next(reversed(gpu_catalog.gpus()))}])
        return self.gpu.model_dump() if isinstance(self.gpu, GPU) else self.gpu

    @staticmethod
    def no_gpu() -> Problem:
        """What is said where the GPU is not given: no foreign file says it."""
        return Problem(
            "gpu",
            "the file does not say which GPU; give gpu (--gpu), one of `workbench gpus`, or local",
        )

    def the_model(self, why: str) -> str | dict[str, Any]:
        """The model, where the file has none (`why`). Raises `PlanError` naming what to give."""
        if self.model is None:
            raise lacks(
                "model",
                f"{why}; give model (--model), a model of `workbench models` or a config.json",
                STAND_IN,
            )
        return self.model.model_dump() if isinstance(self.model, Shape) else self.model

    def cluster(self, gpus: int, **more: Any) -> dict[str, Any]:
        """The `cluster` section of the plan."""
        fabric = self.fabric.model_dump() if isinstance(self.fabric, Fabric) else self.fabric
        found = {"gpu": self.gpu_given(), "gpus": gpus, "fabric": fabric, **more}
        return {key: value for key, value in found.items() if value is not None}


def catalogued(shape: Shape) -> str | None:
    """The catalog's name for a shape, whatever name it bears here; None where the catalog has no
    such shape.
    """
    bare = shape.model_copy(update={"name": ""})
    return next(
        (n for n, e in catalog.models().items() if e.shape.model_copy(update={"name": ""}) == bare),
        None,
    )


ASSUMED = " (assumed: the file does not say it)"
"""After a refusal: the value is none of the file's."""


def as_said(format: Source) -> str:
    """What stands after a refusal of a value that the file says."""
    return f" (as {TITLES[format]} says it)"


DEFAULT = "default"
"""In a note: the plan's own default, whose value is filled in when the plan is complete."""


KEEPS_ALL = "a plan keeps a number of checkpoints; the file's software keeps every one"


def imported(
    format: Source, plan: dict[str, Any], keys: ForeignKeys, given: ImportOptions
) -> Imported:
    """The plan built and checked, with what was made of `keys`; `given.sets` stand above the
    file.

    Raises `PlanError` that names the format, and where no key of the file was used.
    """
    if not keys.translated:
        raise nothing_read(
            [note.field for note in (*keys.untranslated, *keys.ignored)], TITLES[format]
        )
    overridden = _overridden(plan, given.sets)
    try:
        built = build_plan(changed(plan, given.sets))
        full = built.resolve()
    except PlanError as error:
        sources = _sources(format, plan, keys, given.sets)
        raise PlanError(
            [Problem(p.field, p.message + sources.get(p.field, "")) for p in error.problems]
        ) from None
    assumed = [
        KeyNote(n.field, _at(full, n.field) if n.value == DEFAULT else n.value, n.why)
        for n in keys.assumed
    ]
    assumed = [note for note in assumed if note.field not in given.sets]
    ignored = [*keys.ignored, *overridden]
    return Imported(
        format, built, keys.translated, keys.untranslated, assumed, ignored, keys.unknown
    )


def nothing_read(names: Sequence[str], said: str = "") -> PlanError:
    """The refusal of a file in which no key was used: what it has (`names`), read as `said`, and
    what is legal.
    """
    has = f"holds {', '.join(names[:6])}{', ...' * (len(names) > 6)}" if names else "holds no key"
    read = f", none of which a plan can use (read as {said})" if said and names else ""
    return refuse(
        "file", f"is in no format that is known here: it {has}{read}; legal: {legal_formats()}"
    )


def legal_formats() -> str:
    """The formats that are read, each with the keys that show it."""
    return "; ".join(f"{TITLES[name]} ({MARKS[name]})" for name in SOURCES)


def _overridden(plan: dict[str, Any], sets: Mapping[str, Any]) -> list[KeyNote]:
    """What the file said of fields that are set otherwise."""
    found: list[KeyNote] = []
    for path, value in sets.items():
        said: Any = plan
        for name in path.split("."):
            said = said.get(name) if isinstance(said, Mapping) else None
        if said is not None and said != value:
            found.append(KeyNote(path, said, f"what the file means; {value} is set"))
    return found


def _sources(
    format: Source, plan: Mapping[str, Any], keys: ForeignKeys, sets: Mapping[str, Any]
) -> dict[str, str]:
    """Field -> what a refusal of it says of where its value is from; nothing of fields that are
    set.
    """
    sections = ("strategy", "training", "finetune")
    said = [field for field in _dotted(plan) if field.startswith(sections)]
    messages = {
        **dict.fromkeys(said, as_said(format)),
        **{note.field: ASSUMED for note in keys.assumed},
    }
    return {field: words for field, words in messages.items() if field not in sets}


def _dotted(plan: Mapping[str, Any], above: str = "") -> list[str]:
    """Fields of a plan and their sections, by dotted path."""
    found: list[str] = []
    for key, value in plan.items():
        found += [
            above + key,
            *(_dotted(value, f"{above}{key}.") if isinstance(value, Mapping) else ()),
        ]
    return found


def _at(plan: Plan, field: str) -> Any:
    value: Any = plan
    for name in field.split("."):
        value = getattr(value, name)
    return value
