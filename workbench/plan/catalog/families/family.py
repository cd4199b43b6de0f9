"""What a public model family differs in: how its configuration is read and written, and what its
tensors are called.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from workbench.plan.catalog.huggingface_keys import Reading
from workbench.plan.model.model_shape import Shape

Config = dict[str, Any]
"""Content of a config.json."""
Fields = dict[str, Any]
"""Fields of a shape."""


@dataclass(frozen=True)
class TensorNames:
    """Modules of a model here -> modules of the family's language model in transformers."""

    modules: Mapping[str, str]
    """Those outside blocks."""
    block: str
    """Of block {}."""
    block_modules: Mapping[str, str]
    """Those of `blocks.N`, relative to it on both sides."""

    def name(self, parameter: str) -> str:
        """Name in transformers of a parameter here."""
        module, _, leaf = parameter.rpartition(".")
        if found := re.fullmatch(r"blocks\.(\d+)\.(.+)", module):
            return f"{self.block.format(found[1])}.{self.block_modules[found[2]]}.{leaf}"
        return f"{self.modules[module]}.{leaf}"


@dataclass(frozen=True)
class Family:
    """One value of `model_type`."""

    model_type: str
    classes: str
    """How transformers' classes of the family begin."""
    read: Callable[[Reading], Fields]
    """Its configuration as fields of a shape."""
    write: Callable[[Shape], Config] | None = None
    """A shape as its configuration; None: weights are neither read nor written."""
    names: TensorNames | None = None
    """Names of its tensors; None likewise."""
    model_class: str = "ForCausalLM"
    """How the name of its language model in transformers ends."""
    published: bool = False
    """Whether transformers' classes were made from its authors' own files."""

    @property
    def language_model(self) -> str:
        """The class of its language model in transformers."""
        return self.classes + self.model_class
