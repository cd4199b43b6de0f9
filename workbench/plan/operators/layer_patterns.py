"""Strategies of layers that repeat, as one pattern."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase


def layer_pattern(name: str) -> str:
    """A name with `*` for each number between dots."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def joined_layers(strategies: Mapping[str, str]) -> dict[str, str]:
    """Strategies by name, in which names that differ in numbers alone and have one strategy are one
    pattern (`layers.*.linear1`), if it matches no other name.
    """
    groups: dict[str, list[str]] = {}
    for name in strategies:
        groups.setdefault(layer_pattern(name), []).append(name)
    found: dict[str, str] = {}
    for pattern, names in groups.items():
        alike = len({strategies[name] for name in names}) == 1
        others = any(fnmatchcase(name, pattern) for name in strategies.keys() - set(names))
        if len(names) > 1 and alike and not others:
            found[pattern] = strategies[names[0]]
        else:
            found |= {name: strategies[name] for name in names}
    return found
