"""adapter_config.json as PEFT writes it: which modules have adapters, of which rank and scale."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from workbench.adapters.module_patterns import SECONDS, Pattern, SlowPattern, match_modules
from workbench.checkpoint.resume_point import ADAPTER_CONFIG, legal_adapters
from workbench.errors import PlanError, refuse
from workbench.plan.model.block_linears import lora_scale
from workbench.safe_io import json_files
from workbench.safe_io.files import read_some, unread
from workbench.safe_io.json_field_checks import flag, number, text, whole
from workbench.untrusted_text import shown

MOST_BYTES = 16 * 2**20
ALL_LINEAR = "all-linear"
ANY_NAME = "[^.]*"
INITIAL = (True, False, "gaussian", "eva", "orthogonal")
"""Ways to draw adapters that leave the base model as it is."""
READ = {
    "r",
    "lora_alpha",
    "use_rslora",
    "target_modules",
    "exclude_modules",
    "layers_to_transform",
    "layers_pattern",
    "rank_pattern",
    "alpha_pattern",
    "modules_to_save",
    "bias",
    "peft_type",
    "init_lora_weights",
}
WITHOUT_EFFECT = {
    "auto_mapping",
    "base_model_name_or_path",
    "corda_config",
    "ensure_weight_tying",
    "eva_config",
    "fan_in_fan_out",
    "inference_mode",
    "loftq_config",
    "lora_dropout",
    "lora_ga_config",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "task_type",
}
"""Keys that change nothing of what trained adapters compute. `fan_in_fan_out` says how the base's
weight is stored, which its family says too."""


@dataclass(frozen=True)
class PeftConfig:
    """What an adapter_config.json says.

    Attributes:
        path: The file, for messages.
        rank: Of adapters without an entry of `rank_pattern`.
        alpha: Likewise.
        rslora: Whether the scale is alpha / sqrt(rank).
        targets: Ends of module names, or a pattern of complete names, or `all-linear`.
        excluded: Likewise, of modules without adapters.
        layers: Numbers of layers that have adapters; None: all.
        layers_pattern: What stands before a layer's number in names.
        rank_pattern: Pattern of the end of a name -> rank.
        alpha_pattern: Pattern of the end of a name -> alpha.
        saved: `modules_to_save`: modules that were trained and are stored complete.
    """

    path: Path
    rank: int
    alpha: float
    rslora: bool
    targets: str | Sequence[str]
    excluded: str | Sequence[str]
    layers: Sequence[int] | None
    layers_pattern: Sequence[str]
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    saved: Sequence[str]
    matched: Mapping[Pattern, Mapping[str, str | None]] = field(default_factory=dict)
    """Of each pattern the modules that it matches, with its first group (`matching`)."""

    def matching(self, modules: Iterable[str], field: str) -> PeftConfig:
        """This configuration with its patterns matched against the modules of a model.

        Args:
            modules: Their names.
            field: Field of the plan, or option, that errors name.

        Raises:
            PlanError: A pattern takes longer than anyone waits; names it.
        """
        named = [one for one in (self.targets, self.excluded) if isinstance(one, str)]
        patterns = [*map(_complete, named)]
        patterns += map(_saved, self.saved)
        patterns += map(_numbered, self.layers_pattern or [ANY_NAME])
        patterns += map(_end, (*self.rank_pattern, *self.alpha_pattern))
        try:
            return replace(self, matched=match_modules(patterns, modules))
        except SlowPattern as slow:
            raise refuse(
                field,
                f"{shown(slow.args[0])} of '{self.path}' takes more than {SECONDS:g} s to match "
                "the model's modules; legal: a simpler pattern, or names of modules",
            ) from None

    def rank_of(self, module: str) -> int:
        """Rank of a module's adapters."""
        return self.rank_pattern.get(self._key(self.rank_pattern, module), self.rank)

    def scale_of(self, module: str) -> float:
        """Scale of a module's adapters."""
        alpha = self.alpha_pattern.get(self._key(self.alpha_pattern, module), self.alpha)
        return lora_scale(alpha, self.rank_of(module), self.rslora)

    def is_target(self, module: str) -> bool:
        """Whether a linear module that is not the head has adapters."""
        if self._names(self.excluded, module):
            return False
        if self.is_saved(module):
            return False
        if self.targets == ALL_LINEAR:
            return True
        if isinstance(self.targets, str) or self.layers is None:
            return self._names(self.targets, module)
        return module in self.targets or (
            self._names(self.targets, module) and self._layer(module) in self.layers
        )

    def is_saved(self, module: str) -> bool:
        """Whether a module was trained and is stored complete."""
        return any(module in self.matched[_saved(saved)] for saved in self.saved)

    def _layer(self, module: str) -> int | None:
        tried = (self.matched[_numbered(one)] for one in self.layers_pattern or [ANY_NAME])
        number = next((found[module] for found in tried if module in found), None)
        return int(number) if number and number.isdecimal() else None

    def _names(self, targets: str | Sequence[str], module: str) -> bool:
        if isinstance(targets, str):
            return module in self.matched[_complete(targets)]
        return module in targets or any(module.endswith(f".{target}") for target in targets)

    def _key(self, patterns: Mapping[str, Any], module: str) -> str:
        return next((key for key in patterns if module in self.matched[_end(key)]), module)


def _complete(pattern: str) -> Pattern:
    return Pattern(pattern, pattern, complete=True)


def _saved(pattern: str) -> Pattern:
    return Pattern(pattern, rf"(?:^|.*\.){pattern}(?:$|\..*)")


def _numbered(pattern: str) -> Pattern:
    return Pattern(pattern, rf"(?:^|.*?\.){pattern}\.(\d+)\.")


def _end(pattern: str) -> Pattern:
    return Pattern(pattern, rf"(.*\.)?({pattern})$")


def read_peft_config(folder: Path, field: str) -> PeftConfig:
    """The configuration of a PEFT folder.

    Args:
        folder: The folder.
        field: Field of the plan, or option, that errors name.

    Raises:
        PlanError: It cannot be read, or says what cannot be read here; names the key.
    """
    return _Reading(folder / ADAPTER_CONFIG, field).config()


class _Reading:
    """Reads keys, and refuses by name."""

    def __init__(self, path: Path, field: str) -> None:
        self.path, self.field = path, field
        try:
            found = json_files.parse(read_some(path, MOST_BYTES), where="")
        except FileNotFoundError:
            legal = legal_adapters(path.parent)
            raise refuse(field, f"'{path.parent}' holds no adapters; {legal}") from None
        except (OSError, UnicodeDecodeError) as error:
            raise refuse(field, f"'{path}' cannot be read: {unread(error)}") from None
        except PlanError as error:
            why = f"{error.problems[0].field} {error.problems[0].message}".strip()
            raise refuse(field, f"'{path}' is no configuration of adapters: {why}") from None
        if not isinstance(found, dict):
            raise refuse(field, f"'{path}' is no JSON object; get the adapters again")
        self.keys: dict[str, Any] = found

    def config(self) -> PeftConfig:
        self._refuse_others()
        return PeftConfig(
            path=self.path,
            rank=self._rank("r", self.keys.get("r", 8)),
            alpha=self._alpha("lora_alpha", self.keys.get("lora_alpha", 8)),
            rslora=self._checked("use_rslora", False, flag, "true or false"),
            targets=self._patterns("target_modules", required=True),
            excluded=self._patterns("exclude_modules"),
            layers=self._layers(),
            layers_pattern=_listed(self._patterns("layers_pattern")),
            rank_pattern={
                key: self._rank(f"rank_pattern.{key}", value)
                for key, value in self._mapping("rank_pattern").items()
            },
            alpha_pattern={
                key: self._alpha(f"alpha_pattern.{key}", value)
                for key, value in self._mapping("alpha_pattern").items()
            },
            saved=_listed(self._patterns("modules_to_save")),
        )

    def _refuse_others(self) -> None:
        """Refuse what makes the file another kind of adapter than W + s B A."""
        for key, usual, legal in (
            ("peft_type", "LORA", ("LORA",)),
            ("init_lora_weights", True, INITIAL),
            ("bias", "none", ("none", "all", "lora_only")),
        ):
            if (value := self.keys.get(key, usual)) not in legal:
                raise self._wrong(key, value, ", ".join(map(shown, legal)))
        for key in sorted(self.keys.keys() - READ - WITHOUT_EFFECT):
            if self.keys[key] not in (None, False, [], {}, ""):
                why = "which changes what adapters compute; legal here: none"
                raise refuse(self.field, f"'{self.path}' sets {shown(key)}, {why}")

    def _checked(self, key: str, usual: Any, check: Any, legal: str) -> Any:
        if not check(value := self.keys.get(key, usual)):
            raise self._wrong(key, value, legal)
        return value

    def _rank(self, key: str, value: Any) -> int:
        if not whole(value) or not value:
            raise self._wrong(key, value, "a whole number from 1")
        return int(value)

    def _alpha(self, key: str, value: Any) -> float:
        if not number(value):
            raise self._wrong(key, value, "a number")
        return float(value)

    def _mapping(self, key: str) -> dict[str, Any]:
        found = self.keys.get(key) or {}
        if not isinstance(found, dict):
            raise self._wrong(key, found, "a mapping of patterns")
        for pattern in found:
            self._compiled(key, _end(pattern))
        return found

    def _patterns(self, key: str, required: bool = False) -> str | list[str]:
        found = self.keys.get(key)
        if found is None and not required:
            return []
        strings = isinstance(found, list) and all(map(text, found))
        if not (text(found) or strings) or not found:
            raise self._wrong(key, found, "names of modules, or a pattern of names")
        if isinstance(found, str):
            found = ALL_LINEAR if found.lower() == ALL_LINEAR else found
        rules = {"layers_pattern": _numbered, "modules_to_save": _saved}
        one = isinstance(found, str)
        if one or key in rules:
            for pattern in [found] if one else found:
                self._compiled(key, rules.get(key, _complete)(pattern))
        return found if one else list(found)

    def _compiled(self, key: str, pattern: Pattern) -> None:
        try:
            re.compile(pattern.rule)
        except (re.error, RecursionError, OverflowError):
            raise self._wrong(
                key, pattern.given, "a pattern that is a regular expression"
            ) from None

    def _layers(self) -> list[int] | None:
        found = self.keys.get("layers_to_transform")
        if found is None or found == []:
            return None
        found = found if isinstance(found, list) else [found]
        if not all(map(whole, found)):
            raise self._wrong("layers_to_transform", found, "numbers of layers")
        return found

    def _wrong(self, key: str, value: Any, legal: str) -> PlanError:
        return refuse(self.field, f"{key} of '{self.path}' is {shown(value)}; legal here: {legal}")


def _listed(found: str | list[str]) -> list[str]:
    return [found] if isinstance(found, str) else found
