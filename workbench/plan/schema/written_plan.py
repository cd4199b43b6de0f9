"""The plan as written: pure data that says everything a run does.

What was left out is filled by `Plan.resolve`; `Plan.pin` also names by sha256 whatever the plan
points to.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import (
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    field_validator,
    model_serializer,
    model_validator,
)

from workbench.fields.frozen import Frozen
from workbench.fields.validation_messages import plan_error
from workbench.plan.model.model_shape import Shape
from workbench.plan.plan_data import changed, load_data, parse_data
from workbench.plan.schema.cluster import Cluster
from workbench.plan.schema.profiled_model import ProfiledModel
from workbench.plan.schema.python_model import PythonModel
from workbench.plan.schema.run_settings import Checkpoint, Corpus, Telemetry
from workbench.plan.schema.strategy import Strategy
from workbench.plan.schema.tasks import Finetune, Lora, Task, Training
from workbench.safe_io import yaml_files
from workbench.untrusted_text import escaped

if TYPE_CHECKING:
    from workbench.plan.resolved_plan import ResolvedPlan


class Plan(Frozen):
    """One experiment, declared."""

    version: Literal[1] = Field(1, description="Schema version.")
    name: str = Field("", description="What people call it; default: model, GPUs, strategy.")
    model: str | Shape | PythonModel | ProfiledModel = Field(
        description="Catalog name, config.json, GGUF, layer profile (CSV), inline shape, or Python."
    )
    cluster: Cluster = Field(description="GPUs and wiring.")
    strategy: Strategy = Field(default_factory=Strategy, description="How the work is split.")
    training: Training = Field(default_factory=Training, description="What is done.")
    finetune: Finetune | None = Field(
        None, description="Fine-tuning, in place of `training`: a plan has one task."
    )
    corpus: Corpus = Field(default_factory=Corpus, description="Text; a bare string is its source.")
    checkpoint: Checkpoint = Field(default_factory=Checkpoint, description="Saving and loading.")
    telemetry: Telemetry = Field(default_factory=Telemetry, description="Measuring.")

    resolver: ClassVar[Callable[[Plan], ResolvedPlan]]
    """`plan.resolution.resolve`, which registers itself: the schema imports none of what it
    needs.
    """
    pinner: ClassVar[Callable[[Plan], ResolvedPlan]]
    """`plan.resolution.pin`, likewise."""

    @field_validator("corpus", mode="before")
    @classmethod
    def _corpus_by_name(cls, value: object) -> object:
        return {"source": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _one_task(self) -> Plan:
        """Fine-tuning trains: its section is `training` to whatever asks for batch or optimizer."""
        if self.finetune is None:
            return self
        if "training" in self.model_fields_set:
            raise ValueError("has training and finetune; legal: one task section")
        self.__dict__["training"] = self.finetune
        return self

    @model_serializer(mode="wrap")
    def _only_its_task(self, written: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """The plan as data, with the one task section that it has."""
        found: dict[str, Any] = written(self)
        found.pop("finetune" if self.finetune is None else "training", None)
        return found

    @classmethod
    def of(
        cls,
        model: str,
        *,
        gpu: str = "local",
        gpus: int = 1,
        strategy: str = "single",
        set: Mapping[str, Any] | None = None,
    ) -> Plan:
        """A plan from the four choices a person makes, checked for legality.

        Args:
            model: Catalog name, or the path of a Hugging Face config.json or a GGUF file.
            gpu: Name from `workbench gpus`; `local` is what is attached.
            gpus: Ranks in the whole job.
            strategy: Preset from strategies.yaml.
            set: Fields to override, by dotted path.

        Raises:
            PlanError: A name is unknown or a field illegal.
        """
        words = {
            "model": model,
            "cluster": {"gpu": gpu, "gpus": gpus},
            "strategy": {"preset": strategy},
        }
        plan = build_plan(changed(words, set or {}))
        plan.resolve()
        return plan

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan file.

        Raises:
            PlanError: Naming the field and what would be legal.
        """
        return build_plan(load_data(path))

    def replace(self, /, **changes: Any) -> Plan:
        """This plan with fields changed by dotted path, e.g.
        `plan.replace(**{"strategy.tensor.size": 2})`.
        """
        return build_plan(changed(written_fields(self), changes))

    def to_yaml(self) -> str:
        """The plan as YAML, only what was written; reading it back gives an equal plan."""
        return yaml_files.dump(written_fields(self))

    def resolve(self) -> ResolvedPlan:
        """Every default and catalog entry filled in. Milliseconds; reads no corpus.

        Raises:
            PlanError: Naming everything that is illegal.
        """
        return Plan.resolver(self)

    def pin(self) -> ResolvedPlan:
        """`resolve()`, and whatever the plan points to named by sha256 (reads the corpus)."""
        return Plan.pinner(self)

    def complete(self) -> ResolvedPlan:
        """`resolve()` by its former name."""
        _renamed("Plan.complete()", "Plan.resolve()")
        return self.resolve()

    def resolved(self) -> ResolvedPlan:
        """`pin()` by its former name."""
        _renamed("Plan.resolved()", "Plan.pin()")
        return self.pin()

    def __eq__(self, other: object) -> bool:
        """Plans are equal that say the same, whether as written or resolved."""
        return isinstance(other, Plan) and self.model_dump() == other.model_dump()

    def __repr__(self) -> str:
        return f"Plan({self.model_dump(exclude_unset=True)})"

    __str__ = __repr__

    def _repr_html_(self) -> str:
        """The plan file, as a notebook shows it."""
        return f"<pre>{escaped(self.to_yaml())}</pre>"

    @property
    def world_size(self) -> int:
        """Ranks of the job."""
        return self.cluster.gpus

    @property
    def task(self) -> Task:
        """The plan's one task section."""
        return self.training

    @property
    def task_section(self) -> str:
        """Name of that section."""
        return "training" if self.finetune is None else "finetune"

    @property
    def lora(self) -> Lora | None:
        """The adapters that are trained in place of the model's weights, if any are."""
        tune = self.finetune
        return None if tune is None or tune.method != "lora" else tune.lora or Lora()

    @property
    def code(self) -> PythonModel | None:
        """The model, where it is the user's code."""
        return self.model if isinstance(self.model, PythonModel) else None


def build_plan(written: Mapping[str, Any]) -> Plan:
    """A plan from plain data. Raises `PlanError` naming each wrong field, its value and what is
    legal.
    """
    try:
        return Plan.model_validate(dict(written))
    except ValidationError as error:
        raise plan_error(error, written, Plan) from None


def build_corpus(written: Mapping[str, Any]) -> Corpus:
    """A corpus from plain data. Raises `PlanError` as `build_plan` does."""
    try:
        return Corpus.model_validate(dict(written))
    except ValidationError as error:
        raise plan_error(error, written, Corpus) from None


def parse_plan(text: str, where: str = "plan") -> Plan:
    """The plan that YAML `text` says; `where` names it in errors."""
    return build_plan(parse_data(text, where))


def written_fields(plan: Plan) -> dict[str, Any]:
    """The plan as plain data: only what was written."""
    return plan.model_dump(exclude_unset=True)


def _renamed(old: str, new: str) -> None:
    warnings.warn(f"{old} is now {new}", DeprecationWarning, stacklevel=3)
