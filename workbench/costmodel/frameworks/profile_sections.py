"""Sections of a file of `data/frameworks/`, checked so that nothing in it is silently ignored."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Literal, get_args, get_origin

from workbench.costmodel.frameworks.profile_recipes import CONDITIONS
from workbench.errors import refuse

CONSTANTS = ("communicator_mib", "fragmentation")
"""Constants of `data/planner.yaml` that a profile may state itself, in its section `constants`."""
ABOUT = (
    *("title", "matches", "like", "becomes", "before", "fallback", "versions"),
    *("defaults", "defaults_by_model", "cannot", "partition", "separate", "gigabyte"),
)
"""Sections that say which framework is meant, its defaults and its limits."""
ENTRY_KEYS = ("value", "source", "meaning")
DEFAULT_KEYS = ("value", "source", "when")
WHEN = ("several", "no pipeline", "zero-3 without a pipeline")
"""Conditions of a default: more than one device; no pipeline; sharded parameters too."""

Fields = Mapping[str, Any]
"""Type of each field of a part of a profile, by name."""


def check_profile(
    entry: Mapping[str, Any], parts: Mapping[str, Fields], file: str, path: str = ""
) -> None:
    """Refuse what nothing would read.

    Args:
        entry: A profile as its file has it.
        parts: Fields of each part of a profile.
        file: The file, for the message.
        path: What precedes the profile's keys in the file.

    Raises:
        PlanError: It has an unknown key, a value of another kind, or one without its source.
    """
    _check_keys(entry, (*ABOUT, *parts, "constants", "recipes"), file, path)
    constants: Fields = dict.fromkeys(CONSTANTS, float)
    _check_parts(entry, {**parts, "constants": constants}, file, path)
    _check_defaults(entry.get("defaults", {}), file, f"{path}defaults.")
    for model, recipe in entry.get("defaults_by_model", {}).items():
        _check_defaults(recipe, file, f"{path}defaults_by_model.{model}.")
    for place, recipe in enumerate(entry.get("recipes", [])):
        _check_recipe(recipe, parts, file, f"{path}recipes.{place}")


def _check_recipe(recipe: Any, parts: Mapping[str, Fields], file: str, path: str) -> None:
    """A recipe has its source once, and its parts plain values."""
    _check_keys(recipe, (*CONDITIONS, "source", *parts), file, f"{path}.")
    _check_source(recipe, file, path)
    for part in parts.keys() & recipe.keys():
        _check_keys(recipe[part], parts[part], file, f"{path}.{part}.")
        said = {key: {"value": one, "source": "its recipe"} for key, one in recipe[part].items()}
        _check_parts({part: said}, parts, file, f"{path}.")


def _check_parts(
    entry: Mapping[str, Any], parts: Mapping[str, Fields], file: str, path: str
) -> None:
    for part in parts.keys() & entry.keys():
        _check_keys(entry[part], parts[part], file, f"{path}{part}.")
        for key, said in entry[part].items():
            where = f"{path}{part}.{key}"
            _check_keys(said, ENTRY_KEYS, file, f"{where}.")
            value, legal = said.get("value"), _legal_values(parts[part][key], said.get("value"))
            if legal:
                raise refuse(file, f"{where} is {value!r}; legal: {legal}")
            _check_source(said, file, where)


def _check_defaults(defaults: Any, file: str, path: str) -> None:
    """Plan fields, each with a value and the document that says so."""
    if not isinstance(defaults, Mapping):
        raise refuse(file, f"{path[:-1]} is {defaults!r}; legal: a mapping of plan fields")
    for field, said in defaults.items():
        _check_keys(said, DEFAULT_KEYS, file, f"{path}{field}.")
        if "value" not in said:
            raise refuse(file, f"{path}{field} has no value; legal: one of the plan's field")
        if "when" in said and said["when"] not in WHEN:
            raise refuse(file, f"{path}{field}.when is {said['when']!r}; legal: {', '.join(WHEN)}")
        _check_source(said, file, f"{path}{field}")


def _check_source(said: Fields, file: str, where: str) -> None:
    if not said.get("source"):
        raise refuse(file, f"{where} has no source; legal: the document that says so")


def _check_keys(entry: Any, known: Collection[str], file: str, path: str) -> None:
    if not isinstance(entry, Mapping):
        raise refuse(file, f"{path[:-1]} is {entry!r}; legal: a mapping of {', '.join(known)}")
    for key in entry:
        if key not in known:
            raise refuse(file, f"{path}{key} is not known; legal there: {', '.join(known)}")


def _legal_values(kind: Any, value: Any) -> str:
    """What a field of type `kind` takes, in words; empty where `value` is such."""
    if kind is bool:
        return "" if value in (0, 1) else "0 or 1"
    if get_origin(kind) is Literal:
        return "" if value in get_args(kind) else " or ".join(get_args(kind))
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return "" if number else "a number"
