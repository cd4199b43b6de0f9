"""Framework profiles: each part is read by formulas, each field stated by some file, and nothing in
a file is ignored.
"""

from __future__ import annotations

import ast
from dataclasses import MISSING, fields
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest

from workbench import data_files
from workbench.costmodel.frameworks.framework_profile import (
    PART_FIELDS,
    PARTS,
    FrameworkProfile,
    framework_profile,
    framework_table,
    is_fallback,
    stated_constants,
)
from workbench.costmodel.frameworks.profile_recipes import is_called
from workbench.costmodel.frameworks.profile_sections import CONSTANTS, check_profile
from workbench.errors import PlanError
from workbench.machine import gpu_catalog
from workbench.plan.catalog import catalog
from workbench.plan.schema import Plan, Strategy
from workbench.planner.validation.implied_fields.row_batches import MICROBATCHES

PACKAGE = Path(__file__).parents[2] / "workbench"
FORMULAS = sorted(
    path
    for folder in ("costmodel", "planner")
    for path in (PACKAGE / folder).rglob("*.py")
    if path.parent.name != "frameworks"
)
FIELDS = [(part, field.name) for part, kind in PARTS.items() for field in fields(kind)]
PRECISIONS = get_args(Strategy.model_fields["precision"].annotation)
SAID = {"value": 1, "source": "its documentation"}


@cache
def asked() -> frozenset[tuple[str, str]]:
    """(part, field or method) that formulas read as `part.name`, or of a local name of the part."""
    found: set[tuple[str, str]] = set()
    for path in FORMULAS:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        local = {
            target.id: value.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign)
            for target, value in _pairs(node.targets[0], node.value)
            if isinstance(target, ast.Name) and isinstance(value, ast.Attribute)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                owner = node.value
                name = owner.attr if isinstance(owner, ast.Attribute) else ""
                name = local.get(owner.id, "") if isinstance(owner, ast.Name) else name
                found.add((name, node.attr))
    return frozenset((part, name) for part, name in found if part in PARTS)


def _pairs(target: ast.expr, value: ast.expr) -> list[tuple[ast.expr, ast.expr]]:
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        return list(zip(target.elts, value.elts))
    return [(target, value)]


@cache
def read_by(part: str) -> frozenset[str]:
    """Fields of a part that formulas read, by themselves or in one of its methods."""
    path = PACKAGE / f"{PARTS[part].__module__.removeprefix('workbench.').replace('.', '/')}.py"
    methods = {
        node.name: {
            inner.attr
            for inner in ast.walk(node)
            if isinstance(inner, ast.Attribute)
            and isinstance(inner.value, ast.Name)
            and inner.value.id == "self"
        }
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef)
    }
    names = {name for owner, name in asked() if owner == part}
    assert set(methods) <= names, f"no formula calls {part}.{set(methods) - names}"
    return frozenset(names.union(*(methods[name] for name in names & set(methods))))


def test_a_profile_has_eight_parts_at_most() -> None:
    assert len(PARTS) <= 8
    assert [field.name for field in fields(FrameworkProfile)] == list(PARTS)
    assert all(kind.__doc__ for kind in PARTS.values())


@pytest.mark.parametrize(("part", "name"), FIELDS)
def test_a_field_is_read_by_a_formula(part: str, name: str) -> None:
    assert name in read_by(part)


@pytest.mark.parametrize(("part", "name"), FIELDS)
def test_a_field_differs_from_its_default_in_some_framework(part: str, name: str) -> None:
    default = next(field.default for field in fields(PARTS[part]) if field.name == name)
    assert default is not MISSING
    values = {getattr(getattr(framework_profile(one), part), name) for one in framework_table()}
    in_recipes = {
        recipe.get(part, {}).get(name, default)
        for one in framework_table().values()
        for recipe in one.get("recipes", [])
    }
    assert (values | in_recipes) - {default}


def test_constants_of_a_profile_are_the_planners() -> None:
    planner = data_files.read_data_file("data/planner.yaml")["cuda"]
    stated = [key for name in framework_table() for key in stated_constants(name)]
    assert set(stated) == set(CONSTANTS) <= set(planner)


def test_attention_is_a_kernel_that_has_a_rate() -> None:
    known = data_files.read_data_file("data/planner.yaml")["attention_kernels"]
    assert set(get_args(PART_FIELDS["kernels"]["attention"])) - {"unfused"} == set(known)


def test_numbers_of_bytes_say_what_they_are_of() -> None:
    """A switch is what its field says; a count of bytes or tensors has a meaning of its own."""
    for name, entry in framework_table().items():
        for part in ("model_states", "saved_tensors", "constants"):
            for key, said in entry.get(part, {}).items():
                is_switch = part in PARTS and PART_FIELDS[part][key] is bool
                assert is_switch or said.get("meaning"), f"{name}: {part}.{key}"


def test_recipes_and_defaults_name_what_there_is() -> None:
    for name, entry in framework_table().items():
        for recipe in entry.get("recipes", []):
            assert set(recipe.get("gpus", [])) <= set(gpu_catalog.gpus()), name
            assert set(recipe.get("precisions", [])) <= set(PRECISIONS), name
            assert all(
                any(is_called(known, [model]) for known in catalog.models())
                for model in recipe.get("models", [])
            ), name
        for path in {*entry.get("defaults", {})} - {MICROBATCHES}:  # which sets the global batch
            model: Any = Plan
            for step in path.split("."):
                model = next(kind for kind in _models(model) if step in kind.model_fields)
                model = model.model_fields[step].annotation


def _models(annotation: Any) -> list[Any]:
    """Models that a field's annotation may hold."""
    inner = get_args(annotation)
    own = [annotation] if hasattr(annotation, "model_fields") else []
    return own + [found for one in inner for found in _models(one)]


def test_one_profile_stands_for_unknown_frameworks() -> None:
    assert [name for name in framework_table() if is_fallback(name)] == ["textbook"]
    assert not is_fallback("of no file")


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"memory": {}}, "memory is not known; legal there: title, "),
        ({"kernels": {"fuse_qkv": SAID}}, "kernels.fuse_qkv is not known; legal there: attention"),
        ({"kernels": {"fused_qkv": {**SAID, "value": 0.5}}}, "fused_qkv is 0.5; legal: 0 or 1"),
        ({"kernels": {"host": {**SAID, "value": "rust"}}}, "host is 'rust'; legal: python or cpp"),
        ({"loss": {"passes": {**SAID, "value": "few"}}}, "loss.passes is 'few'; legal: a number"),
        ({"loss": {"passes": {**SAID, "value": True}}}, "loss.passes is True; legal: a number"),
        ({"loss": {"passes": {"value": 7}}}, "loss.passes has no source; legal: the document"),
        ({"loss": {"passes": {**SAID, "origin": ""}}}, "loss.passes.origin is not known; legal"),
        ({"loss": {"passes": 7}}, "loss.passes is 7; legal: a mapping of value, source, meaning"),
        ({"loss": 7}, "loss is 7; legal: a mapping of kind, "),
        (
            {"defaults": {"strategy.data.zero": {"value": 1}}},
            "defaults.strategy.data.zero has no source; legal: the document",
        ),
        (
            {"defaults": {"strategy.data.zero": {"source": "its documentation"}}},
            "defaults.strategy.data.zero has no value; legal: one of the plan's field",
        ),
        (
            {"defaults": {"strategy.data.zero": {**SAID, "when": "many"}}},
            "defaults.strategy.data.zero.when is 'many'; legal: several, no pipeline",
        ),
        (
            {"defaults_by_model": {"moonlight": {"training.optimizer.moments": {"value": "bf16"}}}},
            "defaults_by_model.moonlight.training.optimizer.moments has no source; legal",
        ),
        ({"defaults_by_model": {"moonlight": 7}}, "defaults_by_model.moonlight is 7; legal: a"),
        ({"constants": {"gemm_share": SAID}}, "constants.gemm_share is not known; legal there: "),
        ({"recipes": [{"gpu": ["b200"]}]}, "recipes.0.gpu is not known; legal there: gpus, models"),
        ({"recipes": [{"gpus": ["b200"]}]}, "recipes.0 has no source; legal: the document"),
        (
            {"recipes": [{"source": "its file", "experts": {"grouped": 1}}]},
            "recipes.0.experts.grouped is not known; legal there: grouped_gemm, ",
        ),
        (
            {"recipes": [{"source": "its file", "loss": {"passes": "few"}}]},
            "recipes.0.loss.passes is 'few'; legal: a number",
        ),
    ],
)
def test_what_nothing_reads_is_refused(entry: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError) as error:
        check_profile(entry, PART_FIELDS, "data/frameworks/new.yaml")
    assert str(error.value).startswith("data/frameworks/new.yaml: ")
    assert message in str(error.value)


def test_versions_are_checked_as_their_file(monkeypatch: pytest.MonkeyPatch) -> None:
    version = {"title": "new of 2024", "matches": [], "loss": {"pass": SAID}}
    folder = {"new": {"title": "new", "matches": [], "versions": {"new-2024": version}}}
    monkeypatch.setattr(data_files, "read_data_folder", lambda _: folder)
    framework_table.cache_clear()
    try:
        with pytest.raises(PlanError, match=r"new\.yaml: versions\.new-2024\.loss\.pass is not"):
            framework_table()
    finally:
        framework_table.cache_clear()
