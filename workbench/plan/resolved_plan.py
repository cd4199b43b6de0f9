"""A plan with nothing left open: every default filled, every name looked up, every size decided."""

from __future__ import annotations

import warnings
from typing import Any, Literal

from workbench.errors import refuse
from workbench.machine.hardware import GPU, Fabric
from workbench.plan.model import layer_profile_file
from workbench.plan.model.layer_profile import LayerProfile
from workbench.plan.model.model_shape import Shape
from workbench.plan.plan_data import changed
from workbench.plan.schema.cluster import Cluster
from workbench.plan.schema.profiled_model import ProfiledModel
from workbench.plan.schema.python_model import PythonModel
from workbench.plan.schema.strategy import Pipeline, Strategy, axis_sizes
from workbench.plan.schema.written_plan import Plan

NO_SHAPE = (
    "is a layer profile, whose layers have times and sizes but no shape; legal: to estimate and "
    "search it; for all else a catalog name, a shape, a config.json, Python"
)
"""What is said of a layer profile where a shape is needed."""


class ResolvedCluster(Cluster):
    """GPUs and wiring, looked up."""

    gpu: GPU
    nodes: int
    gpus_per_node: int
    fabric: Fabric


class ResolvedPipeline(Pipeline):
    """Pipeline parallelism with the layers of each stage counted."""

    partition: list[int]


class ResolvedStrategy(Strategy):
    """The split with sizes and dtypes decided."""

    pipeline: ResolvedPipeline
    precision: Literal["fp32", "tf32", "bf16", "fp16", "fp8", "mxfp8", "nvfp4"]
    gradient_dtype: Literal["fp32", "bf16", "fp16"]


class ResolvedPlan(Plan):
    """One experiment, as every instrument takes it; made by `Plan.resolve` alone."""

    model: Shape | PythonModel | ProfiledModel
    cluster: ResolvedCluster
    strategy: ResolvedStrategy

    def resolve(self) -> ResolvedPlan:
        """Itself; where it names files by sha256, they are held to it again (`PlanError`)."""
        return Plan.resolver(self) if self.is_pinned else self

    @property
    def is_pinned(self) -> bool:
        """Whether something that the plan points to is named by sha256."""
        named = (
            self.corpus.sha256,
            self.cluster.calibration_sha256,
            self.strategy.pipeline.schedule_sha256,
            self.code and self.code.sha256,
            self.profiled and self.profiled.sha256,
        )
        return any(named)

    def with_fields(self, /, **changes: Any) -> ResolvedPlan:
        """This plan with fields changed by dotted path, and nothing else decided again.

        `replace(...).resolve()` instead decides every default anew and checks legality.
        """
        return ResolvedPlan.model_validate(changed(self.model_dump(), changes))

    @property
    def ties_weights(self) -> bool:
        """Whether embedding and head of its shape are one weight."""
        return isinstance(self.model, Shape) and bool(self.model.tied)

    @property
    def shape(self) -> Shape:
        """The model's shape. Raises `PlanError` where the model is code or a layer profile, which
        have none.
        """
        if isinstance(self.model, PythonModel):
            raise refuse(
                "model.python",
                f"'{self.model.python}' is code, so its shape is not known, and what follows from "
                "it (search, presets that split layers); legal: estimate, rehearse, verify and "
                "run, with --allow-code, or a catalog name, a shape, a config.json",
            )
        if isinstance(self.model, ProfiledModel):
            raise refuse("model", f"'{self.model.layer_profile}' {NO_SHAPE}")
        return self.model

    @property
    def profiled(self) -> ProfiledModel | None:
        """The model, where a layer profile is all that is known of it."""
        return self.model if isinstance(self.model, ProfiledModel) else None

    @property
    def layer_profile(self) -> LayerProfile:
        """The layers of a model that is a layer profile. Raises `PlanError` where it is none, or
        where its file has changed.
        """
        if self.profiled is None:
            raise refuse("model", f"{self.model_name} is no layer profile; legal: a .csv")
        return layer_profile_file.layer_profile(self.profiled)

    @property
    def num_layers(self) -> int:
        """Layers that stages share. Raises `PlanError` where the model is code."""
        return len(self.layer_profile.layers) if self.profiled else self.shape.layers

    @property
    def vocab(self) -> int:
        """Vocabulary entries of the model."""
        return self.code.vocab if self.code else self.shape.vocab

    @property
    def model_name(self) -> str:
        """What the model is called."""
        if self.profiled:
            return self.profiled.name or self.profiled.layer_profile
        return self.code.python if self.code else self.shape.name

    @property
    def gpu(self) -> GPU:
        """The GPU that every rank has."""
        return self.cluster.gpu

    @property
    def host_capacity_bytes(self) -> int | None:
        """A rank's share of its node's host memory; None where that is not known."""
        ranks = min(self.cluster.gpus_per_node, self.world_size)
        return self.cluster.fabric.host_bytes_per_rank(ranks)

    @property
    def card(self) -> GPU:
        """`gpu` by its former name."""
        warnings.warn("Plan.card is now ResolvedPlan.gpu", DeprecationWarning, stacklevel=2)
        return self.gpu

    @property
    def fabric(self) -> Fabric:
        """The network between nodes."""
        return self.cluster.fabric

    @property
    def sizes(self) -> dict[str, int]:
        """Ranks along each axis, in `AXES` order."""
        return axis_sizes(self.strategy, self.world_size)

    @property
    def most_replicas(self) -> int:
        """Ranks that hold the same parameters, context ranks included; of the stage with most."""
        sizes = self.sizes
        return max(self.strategy.pipeline.replicas or [sizes["data"]]) * sizes["context"]

    @property
    def deterministic_kernels(self) -> bool:
        """Whether kernels add in one order every time: where the plan asks for it, and where ranks
        of a GPU grid compute what an operator strategy replicates. Nothing adds up or compares
        their gradients, which must come out equal.
        """
        grid = bool(self.strategy.operators) and self.strategy.tensor.ranks > 1
        return self.training.deterministic or (grid and self.gpu.device == "cuda")

    @property
    def num_microbatches(self) -> int:
        """Microbatches a data-parallel rank takes in a step."""
        return self.task.global_batch // (self.task.micro_batch * self.sizes["data"])

    @property
    def saves_at_end(self) -> bool:
        """Whether a run leaves a checkpoint of its last step: where any are asked for, and of
        fine-tuning always, whose weights are what it is for.
        """
        return bool(self.checkpoint.every) or self.finetune is not None

    @property
    def shards_gradients(self) -> bool:
        """Whether ranks keep shards of gradients alone (ZeRO-2 and 3): they are reduced after each
        microbatch, or after the only one, which asks for no unsharded sum.
        """
        data = self.strategy.data
        return data.zero >= 2 and (data.reduce == "microbatch" or self.num_microbatches == 1)
