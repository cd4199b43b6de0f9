"""What is done with the model: one task section a plan."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from workbench.fields.bounds import (
    Coefficient,
    Epsilon,
    LearningRate,
    Norm,
    Seed,
    Sequences,
    Steps,
    StepsOrNever,
    Tokens,
    Width,
)
from workbench.fields.frozen import Frozen


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
    delayed_update: bool = Field(
        False,
        description="The host steps by the last step's gradients while the next step is computed "
        "(2101.06840).",
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


class Task(Frozen):
    """What every task section holds: batch, sequence length, steps and optimizer.

    A plan has one task; it shares model, cluster and strategy with any other.
    """

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


class Training(Task):
    """Pre-training: what is done with the model."""

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
    deterministic: bool = Field(
        False, description="Repeat a run bit for bit on the same GPUs; slower kernels."
    )
