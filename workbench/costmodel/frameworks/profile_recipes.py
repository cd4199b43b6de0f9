"""Recipes of a profile: what a framework's published configuration of a model, a GPU and a
precision sets in place of the profile's own.

A recipe names what it is of, its source, and parts of a profile with plain values. What it does
not name it is of whatever there is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

CONDITIONS = ("gpus", "models", "precisions")
"""What a recipe can be of: catalog names of GPUs and of models, and precisions of a plan."""


def is_recipe_of(recipe: Mapping[str, Any], gpu: str, model: str, precision: str) -> bool:
    """Whether a recipe is that of a model, GPU and precision."""
    return (
        gpu in recipe.get("gpus", (gpu,))
        and precision in recipe.get("precisions", (precision,))
        and is_called(model, recipe.get("models", ("",)))
    )


def is_called(model: str, names: Iterable[str]) -> bool:
    """Whether a model has one of `names` in its own, whatever separates the words: of
    `LLAMA3_70B` `llama-3-70b` is one, and of `DeepSeekV3 (w/o MTP)` `deepseek-v3`.
    """
    return any(_letters(name) in _letters(model) for name in names)


def _letters(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())
