"""Rotary positions of a configuration, in both spellings: `rope_theta` beside `rope_scaling`, and
transformers 5's `rope_parameters`.
"""

from __future__ import annotations

import json
from typing import Any

from workbench.errors import refuse
from workbench.plan.catalog.families.family import Config, Fields
from workbench.plan.catalog.huggingface_keys import REQUIRED, Reading
from workbench.plan.model.model_shape import Shape
from workbench.plan.model.rope_scaling import BETA_FAST, BETA_SLOW, OF_TYPE, yarn_mscale
from workbench.untrusted_text import shown

KEYS = {
    "factor": "factor",
    "original_positions": "original_max_position_embeddings",
    "low_frequency_factor": "low_freq_factor",
    "high_frequency_factor": "high_freq_factor",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "truncate": "truncate",
    "attention_factor": "attention_factor",
}
"""Field of `RopeScaling` -> key of transformers."""
USUAL = {"beta_fast": BETA_FAST, "beta_slow": BETA_SLOW, "truncate": True}
OTHERS = {"rope_theta", "rope_type", "type", "partial_rotary_factor", "mscale", "mscale_all_dim"}


def read_rotary(
    reading: Reading,
    usual_theta: float,
    scaled: bool = True,
    head_dim: int | None = None,
    share: float | None = None,
    of_kind: str | None = None,
) -> Fields:
    """`rope_theta`, `rope_scaling` and `rotary_dim` of the shape; what they cannot say is noted.

    Args:
        reading: The configuration.
        usual_theta: The family's base, where the configuration has none.
        scaled: Whether the family's model is built with stretched frequencies.
        head_dim: Width of a head, where the family rotates a share of it.
        share: That share as the configuration says it beside these keys; null: all.
        of_kind: Kind of layers that they are read of, where others have their own.
    """
    theta, inner = reading.number("rope_theta", None), reading.section("rope_parameters")
    if of_kind is not None and isinstance(inner.get(of_kind), dict):
        inner = inner[of_kind]
    by_kind = [part for part in inner.values() if isinstance(part, dict)]
    if len({json.dumps(part, sort_keys=True) for part in by_kind}) > 1:
        reading.lacks("rope_parameters", "rope_parameters that differ between kinds of layers")
    parameters = by_kind[0] if by_kind else inner
    found: Fields = {}
    for key, section in (
        ("rope_scaling", reading.section("rope_scaling")),
        ("rope_parameters", parameters),
    ):
        kind = section.get("rope_type", section.get("type"))
        if kind not in (None, "default") and key not in reading.not_modelled:
            if scaled and isinstance(kind, str) and kind in OF_TYPE:
                found[key] = _scaling(reading, key, kind, section)
            else:
                reading.lacks(key, f"{key} of type {shown(kind)}")
        own = section.get("partial_rotary_factor")
        if own is not None and head_dim is not None:
            share = reading.number("partial_rotary_factor", None, section)
        elif own not in (None, 1):
            reading.lacks(key, f"{key} with partial_rotary_factor {shown(own)}")
    also = reading.number("rope_theta", None, parameters)
    if theta is not None and also is not None and theta != also:
        raise refuse(
            "model",
            f"rope_theta of '{reading.where}' is {theta:g}, but in rope_parameters {also:g}; "
            f"keep one",
        )
    if len(found) == 2 and found["rope_scaling"] != found["rope_parameters"]:
        raise refuse(
            "model", f"rope_scaling and rope_parameters of '{reading.where}' differ; keep one"
        )
    return {
        "rope_theta": next(one for one in (theta, also, usual_theta) if one is not None),
        "rope_scaling": next(iter(found.values()), None),
        "rotary_dim": _rotary_dim(head_dim, share),
    }


def _rotary_dim(head_dim: int | None, share: float | None) -> int | None:
    """Rotated entries of a head, as transformers rounds them; None: all."""
    if head_dim is None or share is None or share == 1:
        return None
    return int(head_dim * share)


def _scaling(reading: Reading, key: str, kind: str, section: Config) -> Fields:
    """The fields of `RopeScaling` that `section` says; those as they usually are stay null."""
    keys = {KEYS.get(name, name) for name in ("factor", *OF_TYPE[kind])}
    if unknown := sorted(set(map(str, section)) - keys - OTHERS):
        reading.lacks(key, f"{key} of type {kind} with {', '.join(unknown)[:60]}")
    fields: Fields = {"type": kind}
    for name in ("factor", *OF_TYPE[kind]):
        if name not in KEYS:
            continue
        value = section.get(KEYS[name])
        if name == "original_positions":
            # Phi-3 and its like have it beside the section, where it comes first.
            value = reading.get("original_max_position_embeddings", value)
        if value is not None and value != USUAL.get(name):
            fields[name] = value
    longest = reading.get("max_position_embeddings")
    if kind == "yarn" and fields.get("factor") is None:
        original = fields.get("original_positions")
        if not isinstance(longest, int) or not isinstance(original, int) or original < 1:
            raise reading.wrong(key, section, "a mapping with its factor")
        fields["factor"] = longest / original
    if fields.get("factor", REQUIRED) is REQUIRED:
        raise reading.wrong(key, section, "a mapping with its factor")
    if kind == "dynamic" or fields.get("original_positions") == longest:
        fields.pop("original_positions", None)
    return fields | (_attention_factor(reading, section, fields) if kind == "yarn" else {})


def _attention_factor(reading: Reading, section: Config, fields: Fields) -> Fields:
    """What DeepSeek's `mscale` and `mscale_all_dim` make of it, where it is not said."""
    if "attention_factor" in fields:
        return {}
    factor = reading.number("factor", None, fields)
    said = {name: section.get(name) or None for name in ("mscale", "mscale_all_dim")}
    scales = [reading.number(name, None, said) for name in said]
    if factor is None or None in scales:
        return {}
    one, other = (yarn_mscale(factor, float(scale or 0)) for scale in scales)
    return {"attention_factor": one / other}


def write_rotary(shape: Shape) -> Config:
    """The keys of a shape's rotary positions, in both spellings."""
    theta = {"rope_theta": shape.rope_theta}
    if shape.rotary_dim is not None:
        theta["partial_rotary_factor"] = shape.rotary_dim / int(shape.head_dim or 1)
    if shape.rope_scaling is None:
        parameters = {"rope_type": "default", **theta}
        return {"rope_theta": shape.rope_theta, "rope_parameters": parameters}
    said: dict[str, Any] = shape.rope_scaling.model_dump()
    section = {"rope_type": said.pop("type")} | {
        KEYS.get(name, name): value for name, value in said.items()
    }
    if section["rope_type"] in ("yarn", "llama3"):
        section.setdefault("original_max_position_embeddings", shape.max_positions)
    section |= theta
    return {"rope_theta": shape.rope_theta, "rope_scaling": section, "rope_parameters": section}
