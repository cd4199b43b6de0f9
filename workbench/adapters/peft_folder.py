"""Adapters of a PEFT folder as stored tensors, under the names that they have here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from workbench.adapters.lora_linear import LORA_A, LORA_B
from workbench.adapters.peft_config import ALL_LINEAR, read_peft_config
from workbench.adapters.peft_names import (
    PREFIX,
    ROUTER,
    THEIRS,
    PeftModule,
    adapter_extents,
    adapter_parts,
    peft_modules,
)
from workbench.adapters.peft_writer import ADAPTER_WEIGHTS
from workbench.checkpoint.huggingface.huggingface_names import (
    WEIGHT_KINDS,
    parameter_shapes,
    stored_parts,
)
from workbench.checkpoint.safetensors_reader import FileEntry, SafetensorsFile, read_header
from workbench.checkpoint.safetensors_writer import TORCH_DTYPES
from workbench.checkpoint.tensor_index import Box, StoredTensor, TensorSource
from workbench.errors import PlanError, refuse
from workbench.plan.catalog.families.family import Family
from workbench.plan.catalog.families.stored_parts import StoredPart, stored_extents
from workbench.plan.model.model_shape import Shape

AGAIN = "get the adapters again"
PICKLE = "adapter_model.bin"
HEAD, EMBEDDING = "head", "embedding.tokens.weight"


@dataclass(frozen=True)
class PeftAdapters:
    """Adapters of a folder.

    Attributes:
        source: `NAME.lora_a`, `NAME.lora_b`, and parameters stored complete.
        ranks: Projection -> rank.
        scales: Projection -> scale.
        replaced: Parameters that are stored complete (`modules_to_save`, `bias`).
    """

    source: TensorSource
    ranks: Mapping[str, int]
    scales: Mapping[str, float]
    replaced: tuple[str, ...]


def read_peft_folder(
    folder: Path, family: Family, shape: Shape, field: str = "--adapter"
) -> PeftAdapters:
    """Index of a PEFT folder.

    Args:
        folder: adapter_config.json and adapter_model.safetensors.
        family: The family whose names the base model has.
        shape: The base model.
        field: Field of the plan, or option, that errors name.

    Raises:
        PlanError: The folder is damaged, of another model, or of a kind that is not read; names
            file, key or tensor.
    """
    return _Folder(folder, family, shape, field).adapters()


class _Folder:
    """A folder being read."""

    def __init__(self, folder: Path, family: Family, shape: Shape, field: str) -> None:
        self.folder, self.family, self.shape, self.field = folder, family, shape, field
        self.modules = peft_modules(family, shape)
        self.parts = stored_parts(family, shape)
        names = {_module(part.key) for own in self.parts.values() for part in own}
        config = read_peft_config(folder, field)
        self.config = config.matching(sorted({*names, *self.modules}), field)
        self.path = folder / ADAPTER_WEIGHTS
        if not self.path.is_file() and (folder / PICKLE).is_file():
            raise self._refuse(f"'{folder / PICKLE}' is a pickle; save it as {ADAPTER_WEIGHTS}")
        try:
            self.header = read_header(self.path, AGAIN)
        except ValueError as error:
            raise self._refuse(str(error)) from None

    def adapters(self) -> PeftAdapters:
        pairs, rest = self._sorted()
        self._check_targets(pairs)
        ranks: dict[str, int] = {}
        scales: dict[str, float] = {}
        boxes: dict[str, list[Box]] = {}
        for name, pair in pairs.items():
            module = self.modules[name]
            self._check_shapes(module, pair)
            block = self._is_block(module, pair)
            rank = self.config.rank_of(name) // (len(module.projections) if block else 1)
            self._agree(module, rank, ranks, scales)
            parts = adapter_parts(module, list(module.projections), rank, block)
            for ours, own in parts.items():
                boxes.setdefault(ours, []).extend(_box(part, self.header[part.key]) for part in own)
        extents = adapter_extents(self.shape, ranks)
        replaced = self._replaced(rest)
        tensors = {name: StoredTensor(extents[name], own) for name, own in boxes.items()} | replaced
        by_kind = {(name, kind): it for name, it in tensors.items() for kind in WEIGHT_KINDS}
        size = {self.path.name: (self.path.stat().st_size, None)}
        return PeftAdapters(
            TensorSource(self.folder, by_kind, size, {}, exact=False),
            ranks,
            scales,
            tuple(replaced),
        )

    def _sorted(self) -> tuple[dict[str, set[str]], dict[str, str]]:
        """Module -> which of its pair is there; and tensors that are no adapters: name in
        transformers -> key.
        """
        pairs: dict[str, set[str]] = {}
        rest: dict[str, str] = {}
        for key, entry in self.header.items():
            if not key.startswith(PREFIX):
                raise self._refuse(f"'{self.path}' has {key}; legal: names that begin {PREFIX}")
            if entry.dtype not in TORCH_DTYPES:
                legal = ", ".join(TORCH_DTYPES)
                raise self._refuse(f"{key} of '{self.path}' is {entry.dtype}; legal: {legal}")
            leaf = next((ours for ours, it in THEIRS.items() if key.endswith(f".{it}")), None)
            if leaf is None:
                rest[key.removeprefix(PREFIX).replace(".base_layer.", ".")] = key
                continue
            module = key.removeprefix(PREFIX).removesuffix(f".{THEIRS[leaf]}")
            if module not in self.modules:
                raise self._refuse(
                    f"'{self.path}' has adapters of {module}, which the base model "
                    f"({self.family.classes}, {self.shape.layers} layers) lacks; legal: adapters "
                    "of this model"
                )
            pairs.setdefault(module, set()).add(leaf)
        if not pairs and not rest:
            raise self._refuse(f"'{self.path}' holds no tensor; {AGAIN}")
        return pairs, rest

    def _check_targets(self, pairs: Mapping[str, set[str]]) -> None:
        """Check that those modules have adapters which the configuration says, and no others."""
        for name, module in self.modules.items():
            own = module.projections[0]
            expected = self.config.is_target(name)
            if self.config.targets == ALL_LINEAR and own.name == HEAD:
                expected = False
            lacking = [THEIRS[leaf] for leaf in THEIRS if leaf not in pairs.get(name, set())]
            # Routers and experts are linear modules in some versions of transformers alone.
            optional = self.config.targets == ALL_LINEAR and (
                own.expert is not None or own.name.endswith(ROUTER)
            )
            if name in pairs and not expected:
                raise self._refuse(
                    f"'{self.path}' has adapters of {name}, which target_modules of "
                    f"'{self.config.path}' does not name; {AGAIN}"
                )
            if expected and lacking and (name in pairs or not optional):
                raise self._refuse(f"'{self.path}' lacks {lacking[0]} of {name}; {AGAIN}")

    def _check_shapes(self, module: PeftModule, pair: set[str]) -> None:
        rank = self.config.rank_of(module.name)
        needed = {LORA_A: (rank, module.inputs), LORA_B: (module.outputs, rank)}
        for leaf in sorted(pair):
            key = f"{PREFIX}{module.name}.{THEIRS[leaf]}"
            if (has := self.header[key].shape) != needed[leaf]:
                raise self._refuse(
                    f"{key} of '{self.path}' has shape {list(has)}, rank {rank} and the base model "
                    f"need {list(needed[leaf])}; legal: adapters of this model"
                )

    def _is_block(self, module: PeftModule, pair: set[str]) -> bool:
        """Whether each projection has ranks of its own, as `peft_writer` writes them."""
        count, rank = len(module.projections), self.config.rank_of(module.name)
        if count == 1 or rank != count * self.config.rank or LORA_B not in pair:
            return False
        with SafetensorsFile(self.path) as file:
            value = file.get_tensor(f"{PREFIX}{module.name}.{THEIRS[LORA_B]}")
        parts = adapter_parts(module, list(module.projections), self.config.rank, block=True)
        for part in (part for own in parts.values() for part in own):
            if part.key.endswith(THEIRS[LORA_B]):
                value[tuple(slice(*its) for its in part.theirs)] = 0
        return not value.any()

    def _agree(
        self, module: PeftModule, rank: int, ranks: dict[str, int], scales: dict[str, float]
    ) -> None:
        """Note rank and scale of a module's projections, which all experts share."""
        scale = self.config.scale_of(module.name)
        for one in module.projections:
            same = ranks.setdefault(one.name, rank), scales.setdefault(one.name, scale)
            if same != (rank, scale):
                raise self._refuse(
                    f"'{self.config.path}' gives {module.name} rank {rank} and scale {scale:g}, "
                    f"other experts {same[0]} and {same[1]:g}; legal here: the same of all experts"
                )

    def _replaced(self, rest: Mapping[str, str]) -> dict[str, StoredTensor]:
        """Parameters that the file holds complete."""
        left, found = dict(rest), {}
        sizes, extents = stored_extents(self.parts), parameter_shapes(self.shape)
        for parameter, own in self.parts.items():
            keys = {part.key for part in own}
            if lacking := keys - rest.keys():
                key = min(lacking)
                if self.config.is_saved(_module(key)):
                    named = f"modules_to_save of '{self.config.path}' names"
                    raise self._refuse(f"'{self.path}' lacks {key}, which {named}; {AGAIN}")
                continue
            for key in keys:
                left.pop(key, None)
                if (has := self.header[rest[key]].shape) != sizes[key]:
                    raise self._refuse(
                        f"{rest[key]} of '{self.path}' has shape {list(has)}, the base model's is "
                        f"{list(sizes[key])}; legal: adapters of this model"
                    )
            if self.shape.tied and parameter == EMBEDDING:
                raise self._refuse(
                    f"'{self.path}' has {rest[own[0].key]}, which the base model's head shares; "
                    "legal here: modules_to_save without it"
                )
            boxes = [
                _box(replace(part, key=rest[part.key]), self.header[rest[part.key]]) for part in own
            ]
            found[parameter] = StoredTensor(extents[parameter], boxes)
        if left:
            raise self._refuse(
                f"'{self.path}' has {sorted(left.values())[0]}, which is neither adapter nor "
                f"parameter of the base model; legal: adapters of this model"
            )
        return found

    def _refuse(self, why: str) -> PlanError:
        return refuse(self.field, why)


def _module(key: str) -> str:
    """The module of a parameter in transformers."""
    return key.rpartition(".")[0]


def _box(part: StoredPart, entry: FileEntry) -> Box:
    """The box of a parameter that a stored tensor holds."""
    origin = tuple(start for start, _ in part.theirs)
    return Box(ADAPTER_WEIGHTS, part.key, part.ours, entry.dtype, origin, part.transposed)
