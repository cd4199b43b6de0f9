"""Keys that several families' configurations share: activations, rotary positions, windows."""

from __future__ import annotations

import json

from workbench.errors import refuse
from workbench.plan.catalog.huggingface_keys import Reading
from workbench.untrusted_text import shown

ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "gelu_fast": "gelu",
    "relu": "relu",
}
GATED = {"silu": "swiglu", "swish": "swiglu", "gelu": "geglu", "gelu_pytorch_tanh": "geglu"}


def activation(reading: Reading, key: str, known: dict[str, str], default: str) -> str:
    name = reading.get(key, default)
    if not isinstance(name, str) or name not in known:
        raise refuse(
            "model", f"{key} of '{reading.where}' is {shown(name)}; legal: {', '.join(known)}"
        )
    return known[name]


def theta(reading: Reading, default: float) -> float:
    """The rotary base: its own key, or in transformers 5 one of `rope_parameters`; stretched
    frequencies are noted.
    """
    theta, inner = reading.number("rope_theta", None), reading.section("rope_parameters")
    by_kind = [part for part in inner.values() if isinstance(part, dict)]
    if len({json.dumps(part, sort_keys=True) for part in by_kind}) > 1:
        reading.lacks("rope_parameters", "rope_parameters that differ between kinds of layers")
    scaling = by_kind[0] if by_kind else inner
    for key, section in (
        ("rope_scaling", reading.section("rope_scaling")),
        ("rope_parameters", scaling),
    ):
        kind = section.get("rope_type", section.get("type"))
        if kind not in (None, "default") and key not in reading.not_modelled:
            reading.lacks(key, f"{key} of type {shown(kind)}")
        if section.get("partial_rotary_factor") not in (None, 1):
            reading.lacks(
                key, f"{key} with partial_rotary_factor {shown(section['partial_rotary_factor'])}"
            )
    also = reading.number("rope_theta", None, scaling)
    if theta is not None and also is not None and theta != also:
        raise refuse(
            "model",
            f"rope_theta of '{reading.where}' is {theta:g}, but in rope_parameters {also:g}; "
            f"keep one",
        )
    return next(found for found in (theta, also, default) if found is not None)


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
