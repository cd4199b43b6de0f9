"""Keys that several families' configurations share: activations and windows."""

from __future__ import annotations

from workbench.errors import refuse
from workbench.plan.catalog.huggingface_keys import Reading
from workbench.plan.model.model_shape import Shape
from workbench.untrusted_text import shown

ACTIVATIONS = {
    "gelu": "gelu_exact",
    "gelu_new": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "gelu_fast": "gelu",
    "relu": "relu",
}
GATED = {"silu": "swiglu", "swish": "swiglu", "gelu_pytorch_tanh": "geglu"}


def activation(reading: Reading, key: str, known: dict[str, str], default: str) -> str:
    name = reading.get(key, default)
    if not isinstance(name, str) or name not in known:
        raise refuse(
            "model", f"{key} of '{reading.where}' is {shown(name)}; legal: {', '.join(known)}"
        )
    return known[name]


def written_activation(shape: Shape) -> str:
    """The name of a shape's activation without a gate."""
    return {"gelu": "gelu_new", "gelu_exact": "gelu"}.get(shape.mlp, shape.mlp)


def window(reading: Reading) -> int | None:
    """The sliding window; a model in which only some layers have it is noted."""
    window, kinds = reading.whole("sliding_window", None), reading.get("layer_types", [])
    if not isinstance(kinds, list):
        raise reading.wrong("layer_types", kinds, "a list with the kind of each layer")
    other = {str(kind) for kind in kinds} - (
        {"full_attention"} if window is None else {"sliding_attention"}
    )
    if other:
        reading.lacks("layer_types", f"layer_types with {', '.join(sorted(other))[:60]} among them")
    return window if not kinds or "sliding_attention" in kinds else None
