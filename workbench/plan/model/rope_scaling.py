"""Rotary frequencies stretched to sequences longer than those of pre-training."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from workbench.fields.bounds import Most, PositiveFloat, Tokens
from workbench.fields.frozen import Frozen

Stretch = Annotated[
    float, Field(ge=1), Most(10**6, "a thousand times the longest stretch published")
]
Boundary = Annotated[PositiveFloat, Most(10**6, "rotations within the pre-training length")]
BETA_FAST, BETA_SLOW = 32.0, 1.0
"""YaRN's boundaries, as its authors set them for Llama (2309.00071, 4)."""
OF_TYPE: dict[str, tuple[str, ...]] = {
    "linear": (),
    "dynamic": ("original_positions",),
    "yarn": (
        "original_positions",
        "beta_fast",
        "beta_slow",
        "attention_factor",
        "truncate",
        "mscale_all_dim",
    ),
    "llama3": ("original_positions", "low_frequency_factor", "high_frequency_factor"),
}
"""type -> its fields, beside the factor."""


class RopeScaling(Frozen):
    """As `rope_parameters` of transformers, by whose names its types are known."""

    type: Literal["linear", "dynamic", "yarn", "llama3"] = Field(
        description="Frequencies divided alike, by length, by rotations (2309.00071) or wavelength."
    )
    factor: Stretch = Field(description="How many times longer sequences become.")
    original_positions: Tokens | None = Field(
        None, description="Longest sequence of pre-training, tokens; null: max_positions."
    )
    low_frequency_factor: Boundary | None = Field(
        None, description="Of llama3: frequencies with fewer rotations are divided by the factor."
    )
    high_frequency_factor: Boundary | None = Field(
        None, description="Of llama3: frequencies with more rotations stay."
    )
    beta_fast: Boundary | None = Field(
        None, description="Of yarn: frequencies with more rotations stay; null: 32."
    )
    beta_slow: Boundary | None = Field(
        None, description="Of yarn: those with fewer are divided by the factor; null: 1."
    )
    truncate: Literal[False] | None = Field(
        None, description="Of yarn: false: boundaries between two frequencies are not rounded."
    )
    attention_factor: Boundary | None = Field(
        None, description="Of yarn: scales the rotary tables; null: 0.1 ln(factor) + 1."
    )
    mscale_all_dim: Boundary | None = Field(
        None,
        description="Of yarn: scores times (0.1 mscale_all_dim ln(factor) + 1)^2, as DeepSeek; "
        "null: no.",
    )

    @model_validator(mode="after")
    def _fields_of_the_type(self) -> RopeScaling:
        own = ("type", "factor", *OF_TYPE[self.type])
        for name, value in self:
            if value is not None and name not in own:
                raise ValueError(f"{name} is no field of type '{self.type}'; legal: null")
        if self.type == "llama3":
            low, high = self.low_frequency_factor, self.high_frequency_factor
            if low is None or high is None or low >= high:
                raise ValueError(
                    f"type 'llama3' has low_frequency_factor {low} and high_frequency_factor "
                    f"{high}; legal: both, the first below the second, e.g. 1 and 4"
                )
        if self.type == "yarn" and self.fast <= self.slow:
            raise ValueError(
                f"beta_slow is {self.slow:g} and beta_fast {self.fast:g}; legal: the first below "
                "the second, e.g. 1 and 32"
            )
        return self

    @model_serializer(mode="wrap")
    def _written(self, fields: SerializerFunctionWrapHandler) -> dict[str, Any]:
        written: dict[str, Any] = fields(self)
        return {name: value for name, value in written.items() if value is not None}

    @property
    def fast(self) -> float:
        """YaRN's beta_fast."""
        return BETA_FAST if self.beta_fast is None else self.beta_fast

    @property
    def slow(self) -> float:
        """YaRN's beta_slow."""
        return BETA_SLOW if self.beta_slow is None else self.beta_slow

    @property
    def table_factor(self) -> float:
        """What the rotary tables, and so queries and keys, are multiplied by."""
        if self.attention_factor is not None:
            return self.attention_factor
        return yarn_mscale(self.factor) if self.type == "yarn" else 1.0

    @property
    def score_mscale(self) -> float | None:
        """What queries and keys are each multiplied by beside the tables; None: nothing."""
        if self.mscale_all_dim is None:
            return None
        return yarn_mscale(self.factor, self.mscale_all_dim)


def yarn_mscale(factor: float, coefficient: float = 1.0) -> float:
    """YaRN's scale of the attention for a stretch of `factor` (2309.00071, 3.4)."""
    return 0.1 * coefficient * math.log(factor) + 1.0 if factor > 1 else 1.0
