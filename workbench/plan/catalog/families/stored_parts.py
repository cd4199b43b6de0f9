"""Where a family's files in transformers hold a parameter: as a tensor of its own, as rows of a
fused one, transposed, or as one tensor an expert.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from workbench.plan.model.model_shape import Shape

Slices = tuple[tuple[int, int], ...]
"""(start, stop) of each dim."""


@dataclass(frozen=True)
class StoredPart:
    """A box of a parameter, and where a file has it."""

    key: str
    """Of the stored tensor."""
    ours: Slices
    """In the parameter."""
    theirs: Slices
    """In the stored tensor; it lacks a leading dim that one entry of the parameter fills."""
    transposed: bool = False
    """Whether the last two dims are swapped in the file."""


class Stored(Protocol):
    """How a family stores one module's parameters."""

    def parts(self, leaf: str, extent: tuple[int, ...], shape: Shape) -> Iterator[StoredPart]:
        """Parts of the parameter `leaf` ('weight' or 'bias') of shape `extent`."""


@dataclass(frozen=True)
class Alone:
    """A tensor of its own.

    Attributes:
        module: Its name in transformers.
        first: Rows before ours that no token reads.
        transposed: Whether its weight is stored [in, out] (GPT-2's `Conv1D`).
    """

    module: str
    first: int = 0
    transposed: bool = False

    def parts(self, leaf: str, extent: tuple[int, ...], shape: Shape) -> Iterator[StoredPart]:
        yield _rows(f"{self.module}.{leaf}", extent, (0, extent[0]), self.first, self.transposed)


@dataclass(frozen=True)
class NamedByShape:
    """A tensor of its own, whose name depends on the model's other fields.

    Attributes:
        module: Shape -> its name in transformers.
    """

    module: Callable[[Shape], str]

    def parts(self, leaf: str, extent: tuple[int, ...], shape: Shape) -> Iterator[StoredPart]:
        return Alone(self.module(shape)).parts(leaf, extent, shape)


@dataclass(frozen=True)
class FusedRows:
    """Rows of a fused module, behind those of others.

    Attributes:
        module: The fused module in transformers.
        first: Rows of the others before ours.
        transposed: Whether its weight is stored [in, out].
    """

    module: str
    first: Callable[[Shape], int]
    transposed: bool = False

    def parts(self, leaf: str, extent: tuple[int, ...], shape: Shape) -> Iterator[StoredPart]:
        first = self.first(shape)
        yield _rows(f"{self.module}.{leaf}", extent, (0, extent[0]), first, self.transposed)


@dataclass(frozen=True)
class FusedByHead:
    """Query, key and value rows fused group by group: a group's query heads, its key, its value.

    Attributes:
        module: The fused module in transformers.
        which: 'q', 'k' or 'v'.
    """

    module: str
    which: str

    def parts(self, leaf: str, extent: tuple[int, ...], shape: Shape) -> Iterator[StoredPart]:
        groups, width = int(shape.kv_heads or shape.heads), int(shape.head_dim or 0)
        queries = shape.heads // groups
        rows = (queries if self.which == "q" else 1) * width
        before = {"q": 0, "k": queries, "v": queries + 1}[self.which] * width
        for group in range(groups):
            first = group * (queries + 2) * width + before
            mine = (group * rows, (group + 1) * rows)
            yield _rows(f"{self.module}.{leaf}", extent, mine, first, False)


@dataclass(frozen=True)
class PerExpert:
    """One tensor an expert.

    Attributes:
        module: Name in transformers of expert {}.
    """

    module: str

    def parts(self, leaf: str, extent: tuple[int, ...], shape: Shape) -> Iterator[StoredPart]:
        rest = tuple((0, n) for n in extent[1:])
        for expert in range(extent[0]):
            key = f"{self.module.format(expert)}.{leaf}"
            yield StoredPart(key, ((expert, expert + 1), *rest), rest)


def _rows(
    key: str, extent: tuple[int, ...], mine: tuple[int, int], first: int, transposed: bool
) -> StoredPart:
    rest = tuple((0, n) for n in extent[1:])
    theirs = ((first, first + mine[1] - mine[0]), *rest)
    turned = transposed and len(extent) == 2
    return StoredPart(key, (mine, *rest), theirs[::-1] if turned else theirs, turned)


@dataclass(frozen=True)
class TensorNames:
    """How a family's language model in transformers stores the modules of a model here."""

    modules: Mapping[str, str | Stored]
    """Those outside blocks; a name alone is a tensor of its own."""
    block: str
    """Of block {}."""
    block_modules: Mapping[str, Stored | str]
    """Those of `blocks.N`, relative to it on both sides."""
    ignored: str = r"rotary_emb\.inv_freq"
    """Pattern of the end of names of tensors that the configuration determines."""
    optional_prefix: str = ""
    """What names of files that were saved without a head lack."""

    def parts(self, parameter: str, extent: tuple[int, ...], shape: Shape) -> list[StoredPart]:
        """Parts of a parameter of shape `extent`, which a file's tensors hold."""
        module, _, leaf = parameter.rpartition(".")
        if found := re.fullmatch(r"blocks\.(\d+)\.(.+)", module):
            prefix, stored = f"{self.block.format(found[1])}.", self.block_modules[found[2]]
        else:
            prefix, stored = "", self.modules[module]
        stored = Alone(stored) if isinstance(stored, str) else stored
        return [
            StoredPart(prefix + part.key, part.ours, part.theirs, part.transposed)
            for part in stored.parts(leaf, extent, shape)
        ]


def stored_extents(parts: Mapping[str, list[StoredPart]]) -> dict[str, tuple[int, ...]]:
    """Key -> shape of each stored tensor that the parts of all parameters make up."""
    found: dict[str, tuple[int, ...]] = {}
    for part in (part for own in parts.values() for part in own):
        stops = tuple(stop for _, stop in part.theirs)
        found[part.key] = tuple(map(max, found.get(part.key, stops), stops))
    return found
