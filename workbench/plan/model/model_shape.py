"""The shape of a transformer: every number that decides its parameters, FLOPs and activations."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    NonNegativeInt,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)

from workbench.fields.bounds import (
    WIDTH,
    Coefficient,
    Epsilon,
    EvenShares,
    Experts,
    Frequency,
    LayerIndex,
    Layers,
    Most,
    PositiveFloat,
    ScoreBound,
    Tokens,
    Vocabulary,
    Width,
)
from workbench.fields.frozen import Frozen
from workbench.fields.validation_messages import plan_error
from workbench.plan.model.rope_scaling import RopeScaling

WRITTEN_IF_SET = (
    "branch_norms",
    "zero_centered_norms",
    "embedding_scale",
    "window_rope_theta",
    "parallel_residual",
    "rotary_dim",
    "rope_scaling",
    "qk_norm",
    "attention_softcap",
    "logit_softcap",
    "attention_scale",
)
"""Fields that a written shape lacks where they are null, so that plans from before they existed
stay as they were written.
"""

WRITTEN_IF_CHANGED: dict[str, Any] = {
    "scores": "softmax",
    "groups": None,
    "top_groups": None,
    "score_bias": False,
    "scale": 1.0,
}
"""Likewise of a mixture, where they are as usual."""


class Moe(Frozen):
    """A mixture of experts in place of the feed-forward layer (Shazeer et al. 2017; DeepSeekMoE
    2024).
    """

    experts: Experts = Field(description="Routed experts a layer.")
    top_k: Width = Field(description="Routed experts a token visits.")
    ffn: Width = Field(description="Width of one expert's feed-forward layer.")
    shared: Annotated[NonNegativeInt, WIDTH] = Field(
        0, description="Shared experts that every token visits, each of width `ffn`."
    )
    first_dense: LayerIndex = Field(
        0, description="Leading layers that keep the dense feed-forward layer."
    )
    renormalise: bool = Field(
        True,
        description="A token's gates add up to one (Mixtral); false: as the softmax gives them "
        "(Switch, DeepSeek).",
    )
    capacity: EvenShares | None = Field(
        None,
        description="Rows of an expert a sequence, in even shares; null: no limit; beside "
        "context: estimated only.",
    )
    auxiliary_loss: Coefficient = Field(
        0.01,
        description="Coefficient of the load-balancing loss of each sequence (2101.03961); 0: "
        "none.",
    )
    scores: Literal["softmax", "sigmoid"] = Field(
        "softmax", description="Router's scores over experts; sigmoid: of each alone (2412.19437)."
    )
    groups: Width | None = Field(
        None,
        description="Equal groups of experts, of which a token meets the best (2405.04434); "
        "null: none.",
    )
    top_groups: Width | None = Field(None, description="Groups that a token's experts are of.")
    score_bias: bool = Field(
        False,
        description="Experts are chosen with a bias of each, and groups by their best two "
        "(2412.19437).",
    )
    scale: Annotated[PositiveFloat, Most(10**6, "far beyond a published factor")] = Field(
        1.0, description="Factor of the gates."
    )

    @model_serializer(mode="wrap")
    def _written(self, fields: SerializerFunctionWrapHandler) -> dict[str, Any]:
        written: dict[str, Any] = fields(self)
        for name, usual in WRITTEN_IF_CHANGED.items():
            if name in written and written[name] == usual:
                del written[name]
        return written

    @model_validator(mode="before")
    @classmethod
    def _one_gate_is_the_softmaxs(cls, data: object) -> object:
        if (
            isinstance(data, dict) and data.get("renormalise") is None
        ):  # a single gate divided by itself teaches nothing
            return {**data, "renormalise": data.get("top_k") != 1}
        return data


def rows_of_an_expert(length: int, moe: Moe) -> int:
    """Rows that an expert of limited capacity has for a sequence of `length` tokens."""
    assert moe.capacity is not None
    return max(
        1, math.ceil(moe.capacity * length * moe.top_k / moe.experts - 1e-9)
    )  # 1.1 x 10 is 11, not 12


class Mla(Frozen):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434)."""

    kv_rank: Width = Field(description="Width of the compressed key-value latent.")
    q_rank: Width | None = Field(
        None, description="Width of the compressed query latent; null: full projection."
    )
    rope_dim: Width = Field(description="Rotary part of a query or key head.")
    nope_dim: Width = Field(description="Part of a query or key head without positions.")
    value_dim: Width = Field(description="Width of a value head.")

    @property
    def query_dim(self) -> int:
        """Width of a query or key head."""
        return self.nope_dim + self.rope_dim


class Shape(Frozen):
    """A decoder-only transformer, by its shape alone."""

    name: str = Field("custom", description="Catalog name, or any name.")
    layers: Layers = Field(description="Transformer blocks.")
    hidden: Width = Field(description="Width of the residual stream.")
    heads: Width = Field(description="Query heads.")
    kv_heads: Width | None = Field(
        None, description="Key-value heads; null: as many as query heads."
    )
    head_dim: Width | None = Field(None, description="Width of one head; null: hidden / heads.")
    ffn: Width = Field(description="Width of the dense feed-forward layer.")
    vocab: Vocabulary = Field(description="Vocabulary entries, unpadded.")
    max_positions: Tokens = Field(
        2048, description="Longest sequence, tokens; rows of a learned position table."
    )
    positions: Literal["learned", "rope", "alibi"] = Field(
        "rope", description="How positions enter; alibi: scores fall with distance (2108.12409)."
    )
    norm: Literal["rmsnorm", "layernorm"] = Field("rmsnorm", description="Normalisation.")
    norm_epsilon: Epsilon = Field(1e-5, description="Added to the variance.")
    embedding_norm: bool = Field(False, description="A norm right after the embedding (BLOOM).")
    embedding_scale: ScoreBound | None = Field(
        None, description="Factor of embedded tokens (Gemma: the root of hidden); null: 1."
    )
    branch_norms: Literal["output", "both"] | None = Field(
        None,
        description="Norms of branches at their output (OLMo 2) or both ends (Gemma 2); null: at "
        "their input.",
    )
    zero_centered_norms: Literal[True] | None = Field(
        None, description="RMSNorm multiplies by 1 + weight (Gemma); null: by weight."
    )
    parallel_residual: Literal["one_norm", "two_norms"] | None = Field(
        None,
        description="Both branches read a layer's input, by one norm (Falcon) or two (GPT-NeoX); "
        "null: in turn.",
    )
    mlp: Literal["gelu", "gelu_exact", "relu", "swiglu", "geglu"] = Field(
        "swiglu", description="Feed-forward activation; gelu and geglu by their tanh approximation."
    )
    biases: Literal["none", "qkv", "all"] = Field(
        "none", description="Which linear layers carry a bias."
    )
    tied: bool = Field(False, description="The output head shares the embedding's weight.")
    window: Tokens | None = Field(
        None, description="Sliding attention window, tokens, a query's own included; null: full."
    )
    full_attention_every: Layers | None = Field(
        None,
        description="Of so many layers the last attends to all, the others within the window; "
        "null: none.",
    )
    attention_softcap: ScoreBound | None = Field(
        None,
        description="Bound of attention scores: cap tanh(score / cap) (2408.00118); null: none.",
    )
    logit_softcap: ScoreBound | None = Field(
        None, description="Bound of the output's logits, likewise; null: none."
    )
    attention_scale: ScoreBound | None = Field(
        None, description="Factor of attention scores; null: head_dim^-1/2."
    )
    rope_theta: Frequency = Field(10000.0, description="Rotary base frequency.")
    window_rope_theta: Frequency | None = Field(
        None,
        description="The same of layers with a window, never stretched (Gemma 3); null: no other.",
    )
    rotary_dim: Width | None = Field(
        None, description="Leading entries of a head that are rotated; null: all."
    )
    rope_scaling: RopeScaling | None = Field(
        None, description="Rotary frequencies stretched to longer sequences; null: as they are."
    )
    qk_norm: Literal["head", "width"] | None = Field(
        None,
        description="RMSNorm of queries and keys: by head (Qwen3), of all (OLMo 2); null: none.",
    )
    moe: Moe | None = Field(None, description="Mixture of experts; null: dense.")
    mtp_layers: LayerIndex = Field(
        0,
        description="Last layers that predict further tokens (2412.19437), each with the head "
        "again; estimated only.",
    )
    mla: Mla | None = Field(
        None, description="Multi-head latent attention; null: MHA or GQA by kv_heads."
    )
    unmodelled: str | None = Field(
        None,
        description="What its config.json computes beyond these fields; estimated and rehearsed "
        "only, without it.",
    )

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, data: object) -> object:
        if not isinstance(data, dict):
            return data
        data = dict(data)
        if data.get("kv_heads") is None and data.get("heads") is not None:
            data["kv_heads"] = data["heads"]
        hidden, heads = data.get("hidden"), data.get("heads")
        if (
            data.get("head_dim") is None
            and isinstance(hidden, int)
            and isinstance(heads, int)
            and heads > 0
        ):
            if hidden % heads and data.get("mla") is None:
                raise ValueError(
                    f"heads = {heads} does not divide hidden = {hidden}; give head_dim explicitly"
                )
            data["head_dim"] = hidden // heads or None
        if data.get("full_attention_every") is not None and data.get("window") is None:
            raise ValueError("full_attention_every says which layers have no window; give window")
        return data

    @model_serializer(mode="wrap")
    def _written(self, fields: SerializerFunctionWrapHandler) -> dict[str, Any]:
        written: dict[str, Any] = fields(self)
        for name in WRITTEN_IF_SET:
            if name in written and written[name] is None:
                del written[name]
        return written

    def attended_keys(self, length: int) -> float:
        """Keys that a window leaves a query of the last of `length` tokens, as the mean of layers.

        Of `full_attention_every` layers the last attends to all (Megatron-core's
        window_attn_skip_freq).
        """
        seen = min(length, self.window or length)
        full = self.layers // self.full_attention_every if self.full_attention_every else 0
        return seen + (length - seen) * full / self.layers if full else seen

    def changes_scores(self, length: int) -> bool:
        """Whether attention over `length` tokens does more to scores than scale them and mask
        later keys.
        """
        windowed = self.window is not None and self.window < length
        return windowed or self.positions == "alibi" or self.attention_softcap is not None

    @property
    def gated(self) -> bool:
        """Whether the feed-forward layer has a gate beside its up projection."""
        return self.mlp in ("swiglu", "geglu")

    @property
    def rotated_width(self) -> int:
        """Entries of a query or key head that rotary positions turn."""
        return self.mla.rope_dim if self.mla else self.rotary_dim or int(self.head_dim or 0)

    @property
    def num_residual_norms(self) -> int:
        """Norms of the residual stream's width in a layer."""
        if self.parallel_residual == "one_norm":
            return 1
        return 4 if self.branch_norms == "both" else 2

    @property
    def norms_inputs(self) -> bool:
        """Whether a layer's branches begin with a norm."""
        return self.branch_norms != "output"

    @property
    def norms_outputs(self) -> bool:
        """Whether a layer's branches end with a norm."""
        return self.branch_norms is not None

    @property
    def first_dense(self) -> int:
        """Leading layers without experts: all of a dense model."""
        return self.layers if self.moe is None else min(self.moe.first_dense, self.layers)

    @property
    def q_width(self) -> int:
        """Output width of the query projection."""
        return self.heads * self.query_dim

    @property
    def query_dim(self) -> int:
        """Width of a query or key head."""
        return self.mla.query_dim if self.mla else int(self.head_dim or 0)

    @property
    def score_scale(self) -> float | None:
        """Factor of attention scores; None: query_dim^-1/2."""
        mscale = None if self.rope_scaling is None else self.rope_scaling.score_mscale
        if mscale is None:
            return self.attention_scale
        plain = self.query_dim**-0.5 if self.attention_scale is None else self.attention_scale
        return plain * mscale**2

    @property
    def kv_width(self) -> int:
        """Output width of the key projection (and of the value projection), without MLA."""
        return int(self.kv_heads or 0) * int(self.head_dim or 0)


def shape_from(written: Any) -> Shape:
    """The shape that `written`, plain data, says. Raises `PlanError` naming its field."""
    try:
        return Shape.model_validate(written)
    except ValidationError as error:
        raise plan_error(error, written if isinstance(written, dict) else {}, Shape) from None
