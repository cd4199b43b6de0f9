"""What a public model family differs in: how its configuration is read and written, and what its
tensors are called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from workbench.plan.catalog.families.stored_parts import TensorNames
from workbench.plan.catalog.huggingface_keys import Reading
from workbench.plan.model.model_shape import Shape

Config = dict[str, Any]
"""Content of a config.json."""
Fields = dict[str, Any]
"""Fields of a shape."""
ANY = "any"
"""In place of the values of a field that may have any but null."""


Legal = tuple[Any, ...] | Callable[[Shape], tuple[Any, ...]]
"""Values of a field; or what they are beside the other fields of a shape."""
PLAIN_ATTENTION: dict[str, Legal] = {
    "qk_norm": (None,),
    "attention_softcap": (None,),
    "logit_softcap": (None,),
    "attention_scale": (None,),
    "full_attention_every": (None,),
    "branch_norms": (None,),
    "zero_centered_norms": (None,),
    "embedding_scale": (None,),
    "window_rope_theta": (None,),
    "rope_scaling.mscale_all_dim": (None,),
    "parallel_residual": (None,),
    "rotary_dim": (None,),
}
"""Fields that most families have not."""


Unmet = dict[str, tuple[Any, tuple[Any, ...]]]
"""Field -> (its value, what can be expressed)."""


def unmet(expresses: Mapping[str, Legal], shape: Shape) -> Unmet:
    """The fields of `shape` whose value `expresses` does not have."""
    found = {}
    for name, legal in expresses.items():
        value: Any = shape
        for part in name.split("."):
            value = None if value is None else getattr(value, part)
        can = legal(shape) if callable(legal) else legal
        if value not in can and (value is None or ANY not in can):
            found[name] = value, can
    return found


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
    expresses: Mapping[str, Legal] = field(default_factory=dict)
    """Dotted field of a shape -> its values that the family can express; a field not named: all."""
    model_class: str = "ForCausalLM"
    """How the name of its language model in transformers ends."""
    published: bool = False
    """Whether transformers' classes were made from its authors' own files."""

    def unmet(self, shape: Shape) -> Unmet:
        """What the family cannot express of `shape`."""
        return unmet(self.expresses, shape)

    @property
    def language_model(self) -> str:
        """The class of its language model in transformers."""
        return self.classes + self.model_class
