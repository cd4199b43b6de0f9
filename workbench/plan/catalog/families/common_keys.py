"""Keys that several families' configurations share: activations and windows."""

from __future__ import annotations

from workbench.errors import refuse
from workbench.plan.catalog.families.family import Fields
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
SLIDING, FULL = "sliding_attention", "full_attention"
"""Kinds of layers."""
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


def own_window(reading: Reading, usual: int | None = None) -> int | None:
    """`sliding_window` of a configuration, or what a family has where the key is absent."""
    window: int | None = reading.whole(
        "sliding_window", reading.unless_null("sliding_window", usual)
    )
    return window


def read_windows(
    reading: Reading, layers: int, window: int | None, usual: list[str] | None = None
) -> Fields:
    """`window` and `full_attention_every` of the shape; what they cannot say is noted.

    Args:
        reading: The configuration.
        layers: Of its model.
        window: Of layers that have one; null: the family has none, or it is turned off.
        usual: Kind of each layer where the configuration has no `layer_types`; null: transformers'
            class of the family reads none, and all its layers are alike.
    """
    alike = [FULL if window is None else SLIDING] * layers
    said = reading.get("layer_types")
    if said is not None and not isinstance(said, list):
        raise reading.wrong("layer_types", said, "a list with the kind of each layer")
    kinds = (usual or alike) if said is None else said
    every = kinds.index(FULL) + 1 if FULL in kinds and SLIDING in kinds else None
    fields = {"window": window if SLIDING in kinds else None, "full_attention_every": every}
    if kinds == (alike if usual is None else kinds_of(layers, every if fields["window"] else 1)):
        return fields
    known = {SLIDING, FULL} if usual and window else set(alike)
    other = ", ".join(sorted({str(kind) for kind in kinds} - known))[:60]
    if said is None and window is None:
        reading.lacks("sliding_window", f"sliding_window null beside layers of {SLIDING}")
    elif said is None:
        full = kinds.index(SLIDING)
        what = f"max_window_layers {full}: that many layers attend to all"
        reading.lacks("max_window_layers", what)
    elif other:
        reading.lacks("layer_types", f"layer_types with {other} among them")
    elif len(kinds) != layers:
        reading.lacks("layer_types", f"layer_types of {len(kinds)} layers, and {layers} layers")
    else:
        reading.lacks("layer_types", "layer_types that do not repeat")
    return {"window": window, "full_attention_every": None}


def kinds_of(layers: int, every: int | None) -> list[str]:
    """Layers with a window; of so many the last has none."""
    return [SLIDING if every is None or (i + 1) % every else FULL for i in range(layers)]


def layer_kinds(shape: Shape) -> list[str]:
    """A shape's `layer_types`."""
    every = shape.full_attention_every if shape.window else 1
    return kinds_of(shape.layers, every)
