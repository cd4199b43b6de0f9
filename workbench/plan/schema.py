"""The plan: pure data that says everything a run does.

A plan as written may be short; `Plan.complete()` fills what was left out from the catalog and the
presets, and `Plan.resolved()` also pins by sha256 whatever the plan points to.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, PositiveInt, field_validator

from workbench.errors import refuse
from workbench.plan.field_bounds import (
    KEPT,
    RANKS,
    SECONDS,
    Coefficient,
    Epsilon,
    Gibibytes,
    GigabytesPerSecond,
    InFlight,
    LayerIndex,
    Layers,
    LearningRate,
    Mebibytes,
    Microseconds,
    Norm,
    Price,
    Ranks,
    Seed,
    Sequences,
    Steps,
    StepsOrNever,
    Teraflops,
    Tokens,
    Vocabulary,
    Watts,
    Width,
)
from workbench.plan.model_shape import Frozen, Shape
from workbench.safe_io.untrusted_text import escaped, shown

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

Axis = Literal["tensor", "context", "data", "pipeline"]
AXES: tuple[Axis, ...] = ("tensor", "context", "data", "pipeline")
Precision = Literal["fp32", "tf32", "bf16", "fp16", "fp8", "auto"]
STORED = {"tf32": "fp32", "fp8": "bf16"}
"""Precision of matrix products -> dtype of parameters, activations and gradients, where they
differ.
"""
GradientDtype = Literal["fp32", "bf16", "fp16", "parameters", "auto"]


class PythonModel(Frozen):
    """A model built by the user's own function; runs only where the user allows code.

    The module takes tokens [B, T] and returns logits [B, T, vocab], or takes (tokens, targets) and
    returns the loss summed over tokens. Its parameters are initialised by the factory, under the
    plan's seed.
    """

    python: str = Field(description="pkg.module:factory that returns an nn.Module.")
    vocab: Vocabulary = Field(description="Vocabulary entries: tokens are below it.")
    args: dict[str, Any] = Field(
        default_factory=dict, description="Keyword arguments of the factory."
    )
    sha256: str | None = Field(
        None, description="Hash of the factory's file; filled when a plan is resolved."
    )

    @field_validator("python")
    @classmethod
    def _names_a_function(cls, value: str) -> str:
        module, _, factory = value.partition(":")
        if not all(part.isidentifier() for part in (*module.split("."), factory)):
            raise ValueError(
                f"is {shown(value)}; legal: pkg.module:factory, e.g. models.mine:build"
            )
        return value


class Card(Frozen):
    """One accelerator: physical constants with their source in data/gpus.yaml."""

    name: str = Field(description="Catalog name.")
    title: str = Field("", description="Name in full.")
    device: Literal["cuda", "npu", "cpu"] = Field("cuda", description="torch device type.")
    architecture: str = Field(
        "", description="Generation of its matrix units, as data/planner.yaml names them."
    )
    memory_gib: Gibibytes = Field(description="Usable device memory, GiB.")
    bandwidth_gbs: GigabytesPerSecond = Field(description="Memory bandwidth, GB/s.")
    tflops: dict[str, Teraflops] = Field(
        description="Dense peak by dtype (fp32, tf32, fp16, bf16, fp8), TFLOP/s."
    )
    link_gbs: GigabytesPerSecond = Field(
        description="Bandwidth to peers in the node, one direction, GB/s."
    )
    pcie_gbs: GigabytesPerSecond = Field(description="Bandwidth to the host, one direction, GB/s.")
    watts: Watts | None = Field(None, description="Board power, W.")
    price_per_hour: Price | None = Field(
        None, description="On-demand price of one card, USD an hour."
    )
    price_source: str = Field("", description="Whose price it is, and when it was read.")
    source: str = Field("", description="Where the figures come from.")


class Fabric(Frozen):
    """The network between nodes, and how many cards share a node."""

    name: str = Field(description="Catalog name.")
    gpus_per_node: Ranks = Field(description="Cards in a node.")
    nic_gbs: GigabytesPerSecond = Field(
        description="Network bandwidth of one node, one direction, GB/s."
    )
    link_latency_us: Microseconds = Field(
        description="Latency of a hop inside the node, microseconds."
    )
    nic_latency_us: Microseconds = Field(
        description="Latency of a hop between nodes, microseconds."
    )
    rack_nodes: Ranks | None = Field(
        None, description="Nodes of a rack or pod; null: one network joins all."
    )
    rack_gbs: GigabytesPerSecond | None = Field(
        None, description="Bandwidth of a node out of its rack, GB/s; null: nic_gbs."
    )
    rack_latency_us: Microseconds | None = Field(
        None, description="Latency of a hop between racks, microseconds."
    )
    source: str = Field("", description="Where the figures come from.")


class Cluster(Frozen):
    """Which cards, how many, and how they are wired."""

    gpu: str | Card = Field(
        description="Card name from `workbench gpus`; `local` is what is attached."
    )
    gpus: Annotated[int, Field(ge=1), RANKS] = Field(
        description="Ranks in the whole job; at most 1,048,576."
    )
    nodes: Ranks | None = Field(
        None, description="Nodes; default gpus / gpus_per_node, rounded up."
    )
    gpus_per_node: Ranks | None = Field(
        None, description="Cards in a node; default from the fabric."
    )
    fabric: str | Fabric | None = Field(
        None, description="Fabric name; default: the card's usual one."
    )
    calibration: str | None = Field(
        None, description="Calibration file that `workbench calibrate` wrote."
    )
    calibration_sha256: str | None = Field(
        None, description="Hash of that file; filled when a plan is resolved."
    )


class Data(Frozen):
    """Data parallelism; its size is what the other axes leave over (Rajbhandari et al. 2020 for
    ZeRO).
    """

    zero: Literal[0, 1, 2, 3] = Field(
        0, description="ZeRO stage: 1 shards optimizer, 2 gradients, 3 parameters."
    )
    shard: Ranks | Literal["all"] = Field(
        "all", description="Ranks a shard group spans; rest replicate."
    )
    offload: Literal["none", "optimizer", "parameters"] = Field(
        "none", description="What lives in host memory."
    )
    reduce: Literal["step", "microbatch"] = Field("step", description="When gradients are reduced.")
    keep_gathered: bool = Field(
        False, description="ZeRO-3 keeps gathered parameters between forward and backward."
    )
    bucket_mib: Mebibytes = Field(25.0, description="Gradient bucket, MiB.")
    overlap: bool = Field(
        True, description="Hide reduction and gathering behind compute; false: estimated only."
    )
    in_flight: InFlight = Field(
        2,
        description="ZeRO-3 units gathered, and ZeRO-2 or 3 buckets reduced, at once, the one "
        "in use included.",
    )


class Tensor(Frozen):
    """Tensor parallelism (Shoeybi et al. 2019; 2-D, 2.5-D, 3-D: Colossal-AI)."""

    size: Ranks | Annotated[list[Ranks], Field(min_length=1)] = Field(
        1, description="Ranks, or the grid [q,q], [q,q,d], [l,l,l]."
    )
    algorithm: Literal["1d", "2d", "2.5d", "3d"] = Field(
        "1d", description="How matrix products are split."
    )
    sequence: bool = Field(
        False, description="Split norms and residuals over the sequence (2205.05198)."
    )

    @property
    def ranks(self) -> int:
        """Ranks of the whole tensor axis."""
        return self.size if isinstance(self.size, int) else math.prod(self.size)


class Pipeline(Frozen):
    """Pipeline parallelism (GPipe 2019, DAPPLE 2021, 2104.04473)."""

    size: Ranks = Field(1, description="Pipeline ranks.")
    schedule: str = Field(
        "1f1b",
        description="gpipe | 1f1b | interleaved | zb-h1 | zb-h2 | zb-v | dualpipe-v | a CSV.",
    )
    schedule_sha256: str | None = Field(
        None, description="Hash of the CSV; filled when a plan is resolved."
    )
    chunks: Layers = Field(1, description="Model chunks a rank.")
    partition: Literal["balanced", "uniform"] | list[Layers] = Field(
        "balanced", description="Layers a stage: balanced by cost, uniform, or a list."
    )
    replicas: list[Ranks] | None = Field(
        None,
        description="Replicas of each stage (DAPPLE), in all gpus / (tensor x context); "
        "estimated only.",
    )


class Context(Frozen):
    """Context parallelism: the sequence split inside attention too."""

    size: Ranks = Field(1, description="Ranks.")
    algorithm: Literal["ring", "ulysses"] = Field(
        "ring", description="Ring attention or all-to-all over heads."
    )


class Expert(Frozen):
    """Expert parallelism; divides data x context and multiplies nothing."""

    size: Ranks = Field(1, description="Ranks over which experts are spread.")


class Strategy(Frozen):
    """How the work is split. A preset supplies it; what is written beside the preset overrides
    it.
    """

    preset: str | None = Field(None, description="Name from strategies.yaml.")
    data: Data = Field(default_factory=Data, description="Data parallelism and ZeRO.")
    tensor: Tensor = Field(default_factory=Tensor, description="Tensor parallelism.")
    pipeline: Pipeline = Field(default_factory=Pipeline, description="Pipeline parallelism.")
    context: Context = Field(default_factory=Context, description="Context parallelism.")
    expert: Expert = Field(default_factory=Expert, description="Expert parallelism.")
    operators: dict[str, Any] = Field(
        default_factory=dict,
        description="Module pattern -> pieces over the tensor ranks, ((4,1),(1,1)); what none "
        "names is repeated.",
    )
    placement: list[Axis] = Field(default=list(AXES), description="Axes, innermost first.")
    recompute: Literal["none", "selective", "full"] | list[LayerIndex] = Field(
        "none",
        description="Activations recomputed in backward; a list names layers recomputed in full.",
    )
    stack: str = Field(
        "workbench",
        description="Software that runs it: workbench; a name in data/stacks.yaml: estimated only.",
    )
    precision: Precision = Field(
        "auto",
        description="Parameters, activations, gradients; auto: bf16, else fp16, CPU fp32; "
        "fp8: estimated only.",
    )
    gradient_dtype: GradientDtype = Field(
        "auto",
        description="Gradients add up and are reduced in it; parameters: as they are; auto: fp32 "
        "if several add up.",
    )
    kernels: Literal["eager", "compiled", "fused"] = Field(
        "eager", description="What runs memory-bound operators."
    )


class Optimizer(Frozen):
    """The optimizer and its learning-rate schedule."""

    name: Literal["adamw", "sgd"] = Field(
        "adamw", description="AdamW (1711.05101), or SGD with momentum."
    )
    learning_rate: LearningRate = Field(3e-4, description="Peak learning rate.")
    beta1: float = Field(0.9, ge=0, lt=1, description="AdamW first-moment decay; SGD momentum.")
    beta2: float = Field(0.95, ge=0, lt=1, description="AdamW second-moment decay.")
    epsilon: Epsilon = Field(1e-8, description="AdamW denominator floor.")
    weight_decay: Coefficient = Field(
        0.1, description="Decoupled decay of matrices; vectors are not decayed."
    )
    warmup_steps: StepsOrNever = Field(0, description="Steps of linear warm-up.")
    decay: Literal["constant", "linear", "cosine"] = Field(
        "cosine", description="Shape after warm-up."
    )
    final_ratio: float = Field(0.1, ge=0, le=1, description="Last learning rate over the peak.")
    moments: Literal["fp32", "bf16", "int8"] = Field(
        "fp32", description="Dtype of the moments; int8: estimated only."
    )
    master: Literal["auto", "none"] = Field(
        "auto", description="auto: fp32 master weights beside 16-bit parameters."
    )
    clip: Norm | None = Field(1.0, description="Largest global gradient norm; null: no clipping.")


class Evaluation(Frozen):
    """Loss on text held out from training."""

    every: StepsOrNever = Field(0, description="Steps between evaluations; 0: never.")
    batches: Sequences = Field(2, description="Global batches an evaluation reads.")


class Lora(Frozen):
    """Low-rank adapters (2106.09685): the base model is frozen, two thin matrices a projection are
    trained.
    """

    rank: Width = Field(description="Width of an adapter.")
    targets: Literal["attention", "all"] = Field("all", description="Projections that carry one.")


class Training(Frozen):
    """Pre-training: what is done with the model."""

    sequence_length: Tokens = Field(
        2048, description="Tokens a sequence; default 2048, or the model's longest."
    )
    global_batch: Sequences = Field(
        8,
        description="Sequences a step, over all ranks; default four micro-batches a rank, at "
        "least 8.",
    )
    micro_batch: Sequences = Field(
        1, description="Sequences a rank, or a tensor grid, takes at once."
    )
    steps: Steps = Field(100, description="Optimizer steps.")
    optimizer: Optimizer = Field(default_factory=Optimizer, description="Optimizer and schedule.")
    evaluation: Evaluation = Field(default_factory=Evaluation, description="Held-out loss.")
    lora: Lora | None = Field(
        None, description="Train low-rank adapters only; null: the whole model; estimated only."
    )
    dropout: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Share of entries dropped after embedding and branches; beside operators: "
        "estimated only.",
    )
    seed: Seed = Field(0, description="Seed of initial weights, sampling and dropout.")


class Corpus(Frozen):
    """The text that is trained on."""

    source: str = Field(
        "stdlib", description="stdlib = the Python standard library's sources, or a file or folder."
    )
    tokenizer: Literal["bytes", "bpe"] = Field(
        "bytes", description="Bytes, or a BPE of the model's vocabulary."
    )
    holdout: float = Field(
        0.05, ge=0, lt=1, description="Last share of the text, kept for evaluation."
    )
    sha256: str | None = Field(
        None, description="Hash of the text; filled when a plan is resolved."
    )


class Checkpoint(Frozen):
    """What is saved, and what is loaded at the start."""

    every: StepsOrNever = Field(
        0, description="Steps between checkpoints; 0: only at the end of the run, if at all."
    )
    keep: Annotated[PositiveInt, KEPT] = Field(2, description="Checkpoints kept.")
    load: str | None = Field(
        None,
        description="Checkpoint, or folder of Hugging Face weights with fresh optimizer "
        "state, to start from.",
    )
    asynchronous: bool = Field(
        True,
        description="Steps go on while a copy in host memory is written; false: they wait, "
        "and nothing is copied.",
    )


class Telemetry(Frozen):
    """What a run measures of itself."""

    memory_every: StepsOrNever = Field(
        100, description="Steps between memory samples after the first two; 0: none."
    )
    trackers: list[Literal["tensorboard", "wandb", "mlflow"]] = Field(
        default_factory=list, description="Accelerate trackers to write to."
    )
    timeout_seconds: Annotated[PositiveInt, SECONDS] = Field(
        120, description="Deadline of every collective."
    )


class Plan(Frozen):
    """One experiment, declared."""

    version: Literal[1] = Field(1, description="Schema version.")
    name: str = Field("", description="What people call it; default: model, cards, strategy.")
    model: str | Shape | PythonModel = Field(
        description="Catalog name, config.json path, inline shape, or Python."
    )
    cluster: Cluster = Field(description="Cards and wiring.")
    strategy: Strategy = Field(default_factory=Strategy, description="How the work is split.")
    training: Training = Field(default_factory=Training, description="What is done.")
    corpus: Corpus = Field(default_factory=Corpus, description="Text; a bare string is its source.")
    checkpoint: Checkpoint = Field(default_factory=Checkpoint, description="Saving and loading.")
    telemetry: Telemetry = Field(default_factory=Telemetry, description="Measuring.")

    @field_validator("corpus", mode="before")
    @classmethod
    def _corpus_by_name(cls, value: object) -> object:
        return {"source": value} if isinstance(value, str) else value

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
        """A plan from the four choices a person makes; `set` overrides fields by dotted path.

        Raises `PlanError` where a name is unknown or a field illegal.
        """
        from workbench.plan.plan_files import plan_of

        return plan_of(model, gpu=gpu, gpus=gpus, strategy=strategy, changes=set or {})

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan file (YAML, safely). Raises `PlanError` naming the field and what would be
        legal.
        """
        from workbench.plan.plan_files import load

        return load(path)

    def replace(self, /, **changes: Any) -> Plan:
        """This plan with fields changed by dotted path, e.g.
        `plan.replace(**{"strategy.tensor.size": 2})`.
        """
        from workbench.plan.plan_files import replace

        return replace(self, changes)

    def to_yaml(self) -> str:
        """The plan as YAML, only what was written; reading it back gives an equal plan."""
        from workbench.plan.plan_files import to_yaml

        return to_yaml(self)

    def complete(self) -> Plan:
        """Every default and catalog entry filled in; legal (raises `PlanError`). Milliseconds,
        reads no corpus.
        """
        from workbench.plan.resolve import complete

        return complete(self)

    def resolved(self) -> Plan:
        """`complete()`, and whatever the plan points to named by sha256 (reads the corpus)."""
        from workbench.plan.resolve import resolved

        return resolved(self)

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
    def shape(self) -> Shape:
        """The model's shape; only of a complete plan. Raises `PlanError` where the model is code,
        which has none.
        """
        if isinstance(self.model, PythonModel):
            raise refuse(
                "model.python",
                f"'{self.model.python}' is code, so its shape is not "
                f"known, and what follows "
                "from it (estimates, search, presets that split layers); legal: "
                "rehearse, verify and run, or "
                "a catalog name, a shape, a config.json",
            )
        assert isinstance(self.model, Shape), "complete() the plan first"
        return self.model

    @property
    def code(self) -> PythonModel | None:
        """The model, where it is the user's code."""
        return self.model if isinstance(self.model, PythonModel) else None

    @property
    def vocab(self) -> int:
        """Vocabulary entries of a complete plan's model."""
        return self.code.vocab if self.code else self.shape.vocab

    @property
    def model_name(self) -> str:
        """What a complete plan's model is called."""
        return self.code.python if self.code else self.shape.name

    @property
    def card(self) -> Card:
        """The card; only of a complete plan."""
        assert isinstance(self.cluster.gpu, Card), "complete() the plan first"
        return self.cluster.gpu

    @property
    def fabric(self) -> Fabric:
        """The fabric; only of a complete plan."""
        assert isinstance(self.cluster.fabric, Fabric), "complete() the plan first"
        return self.cluster.fabric

    @property
    def sizes(self) -> dict[str, int]:
        """Ranks along each axis, in `AXES` order; data takes what the others leave over.

        Where stages are replicated unequally, `data` is the least number that all of
        `pipeline.replicas` divide: into so many parts of `micro_batch` sequences a microbatch
        falls, and a stage's replicas share them evenly.
        """
        s = self.strategy
        others = s.tensor.ranks * s.context.size * s.pipeline.size
        return {
            "tensor": s.tensor.ranks,
            "context": s.context.size,
            "data": math.lcm(*(s.pipeline.replicas or [max(1, self.world_size // others)])),
            "pipeline": s.pipeline.size,
        }

    @property
    def num_microbatches(self) -> int:
        """Microbatches a data-parallel rank takes in a step."""
        return self.training.global_batch // (self.training.micro_batch * self.sizes["data"])
