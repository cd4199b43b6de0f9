"""Framework profiles of `data/frameworks/`: found by a framework's name, with documented
defaults as plan fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from workbench.costmodel.frameworks.framework_profile import (
    fallback_framework,
    framework_profile,
    framework_table,
)
from workbench.units import GIB


@dataclass(frozen=True)
class FrameworkDefaults:
    """A framework profile, with what it inherits filled in."""

    name: str
    matches: tuple[str, ...]
    fuses_attention: bool
    """Whether attention is one kernel, not batched GEMMs around a softmax."""
    partition: str
    """How layers are dealt to pipeline stages (`stage_layers.layers_of_stages`)."""
    variants: Mapping[str, str] = field(hash=False)
    earlier_versions: Mapping[float, str] = field(hash=False)
    """Year, the month as its hundredths -> the profile that this one was before it."""
    has_untied_head: bool
    """Whether a head that a model ties to its embedding is a weight of its own."""
    defaults: Mapping[str, Any] = field(hash=False)
    """Plan field by dotted path -> documented default."""
    defaults_by_model: Mapping[str, Mapping[str, Any]] = field(hash=False)
    """Word of a model's name -> what the framework's recipe of that model sets."""
    conditions: Mapping[str, str] = field(hash=False)
    """Plan field -> where alone its default holds, one of `profile_sections.WHEN`."""
    bytes_per_gb: float
    """Bytes of the GB in which its own reports print memory."""
    family: str
    """The profile that this one is an earlier version of, or with other fp8 products; else its own
    name.
    """

    def defaults_of(self, model: str) -> dict[str, Any]:
        """Plan field by dotted path -> what this framework sets for a model of that name."""
        recipes = [r for word, r in self.defaults_by_model.items() if word in model.lower()]
        return {**self.defaults, **{path: one for r in recipes for path, one in r.items()}}


OPTIONS = ("rowwise", "fused_loss", "whole_loss")
"""Conditions that choose an option of one framework, where others choose another framework."""

MERGED = ("defaults", "defaults_by_model")
"""Sections of which an heir states only what differs."""


@lru_cache(maxsize=1)
def framework_defaults() -> dict[str, FrameworkDefaults]:
    """Every profile of `data/frameworks/` by name."""
    table = framework_table()
    return {name: _framework_defaults(name, entry, table) for name, entry in table.items()}


def _framework_defaults(
    name: str, entry: Mapping[str, Any], table: Mapping[str, Any]
) -> FrameworkDefaults:
    base: Mapping[str, Any] = _inherited(entry, table)
    defaults, by_model = (_merged(section, base, entry) for section in MERGED)
    return FrameworkDefaults(
        name=name,
        matches=tuple(entry["matches"]),
        fuses_attention=framework_profile(name).kernels.fused_attention,
        partition=entry.get("partition", base.get("partition", "even")),
        variants=entry.get("becomes", {}),
        earlier_versions=entry.get("before", {}),
        has_untied_head="separate" in entry,
        defaults={path: said["value"] for path, said in defaults.items()},
        defaults_by_model={
            word: {path: said["value"] for path, said in recipe.items()}
            for word, recipe in by_model.items()
        },
        conditions={path: said["when"] for path, said in defaults.items() if "when" in said},
        bytes_per_gb=float(entry.get("gigabyte", base.get("gigabyte", {"value": GIB}))["value"]),
        family=next((whole for whole, one in table.items() if name in _variant_names(one)), name),
    )


def _variant_names(entry: Mapping[str, Any]) -> set[str]:
    becomes = entry.get("becomes", {})
    return {*entry.get("before", {}).values(), *(becomes.get(name, "") for name in OPTIONS)}


def _inherited(entry: Mapping[str, Any], table: Mapping[str, Any]) -> dict[str, Any]:
    """What an entry inherits, nearest first."""
    if "like" not in entry:
        return {}
    parent = table[entry["like"]]
    further = _inherited(parent, table)
    merged = {section: _merged(section, further, parent) for section in MERGED}
    return {**further, **parent, **merged}


def _merged(section: str, far: Mapping[str, Any], near: Mapping[str, Any]) -> dict[str, Any]:
    """A section's entries of both, those of `near` first."""
    return {**far.get(section, {}), **near.get(section, {})}


@lru_cache(maxsize=4096)
def find_framework(
    framework: str,
    sharded: bool,
    flash: bool,
    year: float | None = None,
    rowwise: bool = False,
    fused_loss: bool = False,
    whole_loss: bool = False,
    sequence: bool = False,
) -> FrameworkDefaults:
    """The profile that `framework` means: the first match in it, of those the longest; then what
    that becomes.

    `sharded`: ZeRO-2 or 3 without a pipeline. `flash`: attention is fused. `year`: of the report,
    where it is known. `rowwise`: fp8 products have a scale for every row. `fused_loss`: cross
    entropy is fused. `whole_loss`: it takes all logits at once. `sequence`: it has sequence
    parallelism or selective recomputation, or is of their year.
    """
    words, table = " ".join(framework.lower().split()), framework_defaults()
    found = [
        (words.index(match), -len(match), name)
        for name, profile in table.items()
        for match in profile.matches
        if match in words
    ]
    profile = table[min(found)[2] if found else fallback_framework()]
    named = profile
    options = dict(zip(OPTIONS, (rowwise, fused_loss, whole_loss)))
    conditions = {"sharded": sharded, "flash": flash, "sequence": sequence, **options}
    for condition, holds in conditions.items():
        if holds and condition in profile.variants:
            profile = table[profile.variants[condition]]
    if profile is not named:
        return profile
    earlier = [
        name
        for since, name in profile.earlier_versions.items()
        if year is not None and year < since
    ]
    return table[earlier[0]] if earlier else profile
