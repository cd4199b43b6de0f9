"""A model that is the user's own code."""

from __future__ import annotations

from typing import Any

from pydantic import Field, field_validator

from workbench.fields.bounds import Vocabulary
from workbench.fields.frozen import Frozen
from workbench.untrusted_text import shown


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
