"""What is done with the model: one task section a plan."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from workbench.fields.bounds import (
    Coefficient,
    Epsilon,
    LearningRate,
    LossFactor,
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

    @model_validator(mode="before")
    @classmethod
    def _without_adapters(cls, written: Any) -> Any:
        """Resolved plans of earlier versions say that they train no adapters."""
        if cls is Training and isinstance(written, dict) and "lora" in written:
            if written["lora"] is not None:
                raise ValueError("lora is a field of finetune; legal: finetune, in place of it")
            written = {name: value for name, value in written.items() if name != "lora"}
        return written


class Lora(Frozen):
    """Low-rank adapters (LoRA, 2106.09685): beside the frozen weight W of a linear layer two thin
    matrices are trained, y = x W^T + s x A^T B^T with A [rank, in] and B [out, rank].
    """

    rank: Width = Field(8, description="Width of an adapter; at most that of its layer.")
    alpha: LossFactor = Field(
        16.0, description="Adapters are scaled by alpha / rank, or alpha / sqrt(rank)."
    )
    rslora: bool = Field(
        False, description="Scale by alpha / sqrt(rank) (rank-stabilised LoRA, 2312.03732)."
    )
    targets: Literal["all", "attention"] | Annotated[list[str], Field(min_length=1)] = Field(
        "all",
        description="Linear layers with an adapter: all of the blocks, attention's, or patterns "
        "(attention.[qv]).",
    )
    dropout: float = Field(
        0.0, ge=0, lt=1, description="Share of an adapter's inputs dropped in training."
    )
    initial: str | None = Field(
        None, description="Folder of adapters in PEFT's format to go on from; null: B is zero."
    )
    initial_sha256: str | None = Field(
        None, description="Hash of those adapters; filled when a plan is pinned."
    )

    @model_serializer(mode="wrap")
    def _without_unset(self, written: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without the hash that only pinned plans have."""
        found: dict[str, Any] = written(self)
        if found.get("initial_sha256") is None:
            found.pop("initial_sha256", None)
        return found


class Quantize(Frozen):
    """The frozen base in 4 bits (QLoRA, 2305.14314): weights of linear layers are packed, and
    dequantised where they are used.
    """

    format: Literal["nf4", "int4"] = Field(
        "nf4", description="4-bit NormalFloat, or integers with a scale a group."
    )
    group: Literal[32, 64, 128] = Field(64, description="Columns that share a scale.")
    double: bool = Field(
        True, description="Quantise the scales too: 8 bits, times an fp32 factor of each row."
    )


class Preference(Frozen):
    """Direct preference optimization (DPO, 2305.18290) on pairs of answers."""

    beta: LossFactor = Field(
        0.1, description="How far the policy may move from the reference: larger is nearer."
    )


class Finetune(Training):
    """Fine-tuning: weights that exist are trained further, all of them or adapters beside them."""

    method: Literal["full", "lora"] = Field(
        "lora", description="Train all weights, or low-rank adapters beside frozen ones."
    )
    base: str | None = Field(
        None,
        description="Weights to fine-tune: Hugging Face folder, GGUF file or checkpoint; null: "
        "drawn by the seed.",
    )
    base_sha256: str | None = Field(
        None, description="Hash of those weights; filled when a plan is resolved."
    )
    lora: Lora | None = Field(None, description="The adapters; default rank 8 on all layers.")
    adapter: Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}$")] = Field(
        "default", description="Name of the adapters, among others of the same base."
    )
    quantize: Quantize | None = Field(
        None, description="4-bit base; null: in the dtype of strategy.precision."
    )
    preference: Preference | None = Field(
        None, description="Train on pairs of answers by DPO; null: on tokens."
    )
