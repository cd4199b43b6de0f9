"""Names of low-rank adapters in PEFT's files: one pair of matrices for each module of transformers.

A projection here has its own pair, `MODULE.lora_a` [rank, in] and `MODULE.lora_b` [out, rank]; of
experts they are stacked, [experts, rank, in] and [experts, out, rank]. Where transformers fuses
projections, PEFT has one pair for all of them:

- written, they lie block by block: A [n x rank, in], B [fused out, n x rank] with zeros outside of
  each one's rows and columns. That is exact, and alpha grows as the scale asks;
- read, each projection here takes all of A and its own rows of B.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from workbench.adapters.lora_linear import LORA_A, LORA_B
from workbench.checkpoint.huggingface.huggingface_names import parameter_shapes, stored_parts
from workbench.plan.catalog.families.family import Family
from workbench.plan.catalog.families.stored_parts import Slices, StoredPart
from workbench.plan.model.model_shape import Shape

PREFIX = "base_model.model."
"""What PEFT's wrapper puts before a module's name."""
THEIRS = {LORA_A: "lora_A.weight", LORA_B: "lora_B.weight"}
WEIGHT = ".weight"
ROUTER = ".route"


@dataclass(frozen=True)
class FusedRows:
    """Rows of one module of transformers that a projection here has."""

    name: str
    """Of the projection here, e.g. `blocks.0.attention.q`."""
    expert: int | None
    """Its entry of the leading dim; None: it has no such dim."""
    rows: tuple[tuple[tuple[int, int], tuple[int, int]], ...]
    """(Rows here, rows there) of each box."""


@dataclass(frozen=True)
class PeftModule:
    """A linear module of transformers, and the projections here that are its rows."""

    name: str
    inputs: int
    outputs: int
    projections: tuple[FusedRows, ...]
    """In the order of their rows."""

    def chosen(self, names: Iterable[str]) -> list[FusedRows]:
        """Those projections that have adapters."""
        known = set(names)
        return [one for one in self.projections if one.name in known]


def peft_modules(family: Family, shape: Shape) -> dict[str, PeftModule]:
    """Linear modules of a model in transformers, by name.

    Args:
        family: The family whose names they have.
        shape: The model.
    """
    held: dict[str, dict[tuple[str, int | None], list[StoredPart]]] = {}
    for parameter, parts in stored_parts(family, shape).items():
        name, _, leaf = parameter.rpartition(".")
        if leaf == "weight" and not name.startswith("embedding.") and len(parts[0].theirs) == 2:
            for part in parts:
                expert = part.ours[0][0] if len(part.ours) == 3 else None
                module = held.setdefault(part.key.removesuffix(WEIGHT), {})
                module.setdefault((name, expert), []).append(part)
    return {name: _module(name, own) for name, own in held.items()}


def _module(name: str, own: Mapping[tuple[str, int | None], list[StoredPart]]) -> PeftModule:
    projections = [
        FusedRows(ours, expert, tuple((part.ours[-2], _rows(part)) for part in parts))
        for (ours, expert), parts in own.items()
    ]
    projections.sort(key=lambda one: one.rows[0][1])
    outputs = max(there[1] for one in projections for _, there in one.rows)
    inputs = next(iter(own.values()))[0].ours[-1][1]
    return PeftModule(name, inputs, outputs, tuple(projections))


def _rows(part: StoredPart) -> tuple[int, int]:
    """Rows of the fused weight [out, in], which `Conv1D` stores transposed."""
    return part.theirs[-1] if part.transposed else part.theirs[0]


def adapter_parts(
    module: PeftModule, chosen: list[FusedRows], rank: int, block: bool
) -> dict[str, list[StoredPart]]:
    """Parts of the adapters of `chosen` projections in the pair of their module.

    Args:
        module: A module of transformers.
        chosen: Those of its projections that have adapters.
        rank: Of each of them.
        block: Whether the pair has ranks of their own for each, block by block.

    Returns:
        Name here, with `lora_a` or `lora_b`, -> its parts.
    """
    found: dict[str, list[StoredPart]] = {}
    for place, one in enumerate(chosen):
        ranks = (place * rank, (place + 1) * rank) if block else (0, rank)
        lead: Slices = () if one.expert is None else ((one.expert, one.expert + 1),)
        key, inputs = f"{PREFIX}{module.name}.", (0, module.inputs)
        a = StoredPart(key + THEIRS[LORA_A], (*lead, (0, rank), inputs), (ranks, inputs))
        found[f"{one.name}.{LORA_A}"] = [a]
        found[f"{one.name}.{LORA_B}"] = [
            StoredPart(key + THEIRS[LORA_B], (*lead, ours, (0, rank)), (theirs, ranks))
            for ours, theirs in one.rows
        ]
    return found


def adapted_names(parameters: Iterable[str]) -> list[str]:
    """Projections that have adapters, of the names of all parameters."""
    return [name.removesuffix(f".{LORA_A}") for name in parameters if name.endswith(f".{LORA_A}")]


def adapter_extents(shape: Shape, ranks: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """Parameter -> shape of adapters, by projection and rank."""
    weights, found = parameter_shapes(shape), {}
    for name, rank in ranks.items():
        *lead, outputs, inputs = weights[name + WEIGHT]
        found[f"{name}.{LORA_A}"] = (*lead, rank, inputs)
        found[f"{name}.{LORA_B}"] = (*lead, outputs, rank)
    return found
