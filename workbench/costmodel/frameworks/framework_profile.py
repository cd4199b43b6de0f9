"""Framework profiles of `data/frameworks/`: what Megatron-LM, DeepSpeed, FSDP2 and others do
differently.

A file has one section for each part of `FrameworkProfile`, whose entries are its fields. Where a
file says nothing, a field's default holds: plain PyTorch operators, nothing overlapped. Formulas
ask the parts, never for a framework by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, get_type_hints

from workbench import data_files
from workbench.costmodel.frameworks.data_parallel_behavior import DataParallelBehavior
from workbench.costmodel.frameworks.expert_behavior import ExpertBehavior
from workbench.costmodel.frameworks.kernel_behavior import KernelBehavior
from workbench.costmodel.frameworks.loss_behavior import LOSSES, LossBehavior
from workbench.costmodel.frameworks.model_parallel_behavior import ModelParallelBehavior
from workbench.costmodel.frameworks.model_state_behavior import ModelStateBehavior
from workbench.costmodel.frameworks.profile_recipes import is_recipe_of
from workbench.costmodel.frameworks.profile_sections import Fields, check_profile
from workbench.costmodel.frameworks.recompute_behavior import RecomputeBehavior
from workbench.costmodel.frameworks.saved_tensor_behavior import SavedTensorBehavior
from workbench.errors import refuse
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.schema import Strategy

DEFAULT_FRAMEWORK = Strategy().stack
"""Framework profile of a plan that names none."""
PROFILE_FOLDER = "data/frameworks"


@dataclass(frozen=True)
class FrameworkProfile:
    """What a framework keeps in memory, how it computes and how it communicates: documented
    behavior by part. How much it is worth is a constant of the hardware.
    """

    model_states: ModelStateBehavior = field(default_factory=ModelStateBehavior)
    saved_tensors: SavedTensorBehavior = field(default_factory=SavedTensorBehavior)
    recompute: RecomputeBehavior = field(default_factory=RecomputeBehavior)
    loss: LossBehavior = field(default_factory=LossBehavior)
    data_parallel: DataParallelBehavior = field(default_factory=DataParallelBehavior)
    model_parallel: ModelParallelBehavior = field(default_factory=ModelParallelBehavior)
    experts: ExpertBehavior = field(default_factory=ExpertBehavior)
    kernels: KernelBehavior = field(default_factory=KernelBehavior)


OF_TORCH: Mapping[str, Any] = {"flash": "flash-2", "efficient": "flash-1"}
"""Backend of torch's `scaled_dot_product_attention` -> the generation that it is as fast as:
FlashAttention-2 since torch 2.2; xFormers', beside FlashAttention's in 2307.08691, figures 4 to 6.
"""
LIGER_GATED_TENSORS = 3.0
"""Gate, up and their product; LigerSiLUMul computes the activated gate again (2410.10989)."""

PARTS: Mapping[str, Any] = get_type_hints(FrameworkProfile)
"""Class of each part, by its name in `FrameworkProfile` and in files."""
PART_FIELDS: Mapping[str, Fields] = {name: get_type_hints(kind) for name, kind in PARTS.items()}
INHERITED = (*PARTS, "constants")
"""Sections of which an heir by `like` states only what differs; `recipes` it states anew."""


@lru_cache(maxsize=1)
def framework_table() -> Mapping[str, Mapping[str, Any]]:
    """Every file of `data/frameworks/` and the versions in it, by profile name.

    Raises:
        PlanError: A file has a key that nothing reads, or a value of another kind.
    """
    found: dict[str, Mapping[str, Any]] = {}
    for name, entry in data_files.read_data_folder(PROFILE_FOLDER).items():
        versions = entry.get("versions", {})
        for path, profile in (("", entry), *((f"versions.{v}.", versions[v]) for v in versions)):
            check_profile(profile, PART_FIELDS, f"{PROFILE_FOLDER}/{name}.yaml", path)
        found[name] = entry
        found |= versions
    return found


def framework_profile(
    name: str, gpu: str = "", model: str = "", precision: str = ""
) -> FrameworkProfile:
    """Framework profile by name, with what its recipes of a GPU, model and precision set.

    Raises:
        PlanError: There is no profile of this name.
    """
    return _profile(name, _recipes_of(name, gpu, model, precision))


def plan_profile(plan: ResolvedPlan) -> FrameworkProfile:
    """Framework profile of a plan, with what recipes of its GPU, model and precision set, and with
    the kernels and the loss that the plan itself states, where they are not counted one by one.
    """
    s = plan.strategy
    usual = framework_profile(s.stack, plan.gpu.name, plan.model_name, s.precision)
    return usual if usual.kernels.counts_operators else _as_stated(usual, s)


def _as_stated(usual: FrameworkProfile, s: Strategy) -> FrameworkProfile:
    """`usual` with `strategy.attention`, `strategy.loss` and kernels of a layer in its place."""
    kernels, saved, loss = usual.kernels, usual.saved_tensors, usual.loss
    if s.attention != "auto":
        kernels = replace(kernels, attention=OF_TORCH.get(s.attention, s.attention))
    if s.kernels == "liger":
        saved = replace(saved, gated_tensors=min(LIGER_GATED_TENSORS, saved.gated_tensors))
    if s.loss != "auto" and s.loss != loss.kind:
        loss = LOSSES[s.loss]
    return replace(usual, kernels=kernels, saved_tensors=saved, loss=loss)


@lru_cache(maxsize=4096)
def _recipes_of(name: str, gpu: str, model: str, precision: str) -> tuple[int, ...]:
    """Places of the recipes that hold, of those that the profile `name` states or inherits."""
    recipes = enumerate(_entry(name)["recipes"])
    return tuple(place for place, one in recipes if is_recipe_of(one, gpu, model, precision))


@lru_cache(maxsize=256)
def _profile(name: str, recipes: tuple[int, ...]) -> FrameworkProfile:
    """A profile with some of its recipes: of two that set the same, the later one counts."""
    entry = _entry(name)
    said = {part: dict(entry[part]) for part in PARTS}
    for recipe in (entry["recipes"][place] for place in recipes):
        for part in recipe.keys() & said.keys():
            said[part] |= {key: {"value": value} for key, value in recipe[part].items()}
    return FrameworkProfile(**{part: _part(part, values) for part, values in said.items()})


@lru_cache(maxsize=64)
def stated_constants(name: str) -> Mapping[str, float]:
    """Constants of `data/planner.yaml` that the framework profile `name` states itself."""
    return {key: float(said["value"]) for key, said in _entry(name)["constants"].items()}


@lru_cache(maxsize=1)
def fallback_framework() -> str:
    """The framework profile that stands for a framework that no file names."""
    return next(name for name in framework_table() if is_fallback(name))


def is_fallback(name: str) -> bool:
    """Whether a framework profile stands for a framework that no file names."""
    return bool(framework_table().get(name, {}).get("fallback"))


def _part(name: str, said: Mapping[str, Any]) -> Any:
    """A part of a profile with the values that files state, in the types of its fields."""
    kinds = PART_FIELDS[name]
    values = {key: one["value"] for key, one in said.items()}
    return PARTS[name](**{key: _typed(kinds[key], value) for key, value in values.items()})


def _typed(kind: Any, value: Any) -> bool | float | str:
    if kind is bool:
        return bool(value)
    return value if isinstance(value, str) else float(value)


def _entry(name: str) -> dict[str, Any]:
    """What a profile states by section, with what it inherits by `like` filled in."""
    table = framework_table()
    if name not in table:
        raise refuse("strategy.stack", f"is '{name}'; legal: {', '.join(table)}")
    entry = table[name]
    base: Mapping[str, Any] = _entry(entry["like"]) if "like" in entry else {}
    merged = {key: {**base.get(key, {}), **entry.get(key, {})} for key in INHERITED}
    return {**merged, "recipes": entry.get("recipes", base.get("recipes", []))}
