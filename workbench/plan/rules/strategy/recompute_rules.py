"""Which modules a plan recomputes in backward, and whether its patterns name any."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase

from workbench.errors import Problem
from workbench.plan.model.model_shape import Shape
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.schema import Recompute
from workbench.untrusted_text import shown

FIELD = "strategy.recompute"
WORDS: dict[str, str] = {"none": "", "selective": "blocks.*.attention.attend", "full": "blocks.*"}
"""What a word of the field stands for."""


def recomputed_modules(recompute: Recompute, shape: Shape) -> list[str]:
    """Paths of the modules that save their inputs alone; none lies within another.

    Args:
        recompute: A plan's `strategy.recompute`.
        shape: Of the model.
    """
    if isinstance(recompute, str):
        patterns: list[str] = [WORDS[recompute]]
    else:
        patterns = [f"blocks.{one}" if isinstance(one, int) else one for one in recompute]
    sites = _sites(shape)
    named = {path for path in sites if any(fnmatchcase(path, pattern) for pattern in patterns)}
    return [path for path in sites if path in named and not named & set(_around(path))]


def recomputed_layers(recompute: Recompute, shape: Shape) -> list[int]:
    """Layers that save their input alone."""
    named = set(recomputed_modules(recompute, shape))
    return [layer for layer in range(shape.layers) if f"blocks.{layer}" in named]


def problems(plan: ResolvedPlan) -> Iterator[Problem]:
    """Why the field is not legal for the plan's model."""
    wanted, layers = plan.strategy.recompute, plan.shape.layers
    yield from _offload(plan)
    if isinstance(wanted, str):
        return
    outside = any(isinstance(one, int) and one >= layers for one in wanted)
    if outside or len(set(wanted)) < len(wanted):
        legal = f"each layer at most once, from 0 to {layers - 1}"
        yield Problem(FIELD, f"is {wanted}; legal: {legal}, and each pattern once")
        return
    kept, sites = recomputed_modules(wanted, plan.shape), _sites(plan.shape)
    for pattern in [one for one in wanted if isinstance(one, str)]:
        named = [path for path in sites if fnmatchcase(path, pattern)]
        if not named:
            yield Problem(FIELD, f"{shown(pattern)} names {_NOTHING}; legal: {_legal(sites)}")
        elif not set(named) & set(kept):
            around = next(path for path in _around(named[0]) if path in kept)
            within = f"names {named[0]}, which lies within {around}"
            yield Problem(
                FIELD, f"{shown(pattern)} {within}, recomputed already; legal: one of them"
            )


def _offload(plan: ResolvedPlan) -> Iterator[Problem]:
    s, field = plan.strategy, "strategy.offload_activations"
    if not s.offload_activations:
        return
    if s.stack != "workbench":
        yield Problem(
            field,
            f"is true, but what {s.stack} offloads is its own; legal: false, or "
            "strategy.stack: workbench",
        )
    elif not recomputed_layers(s.recompute, plan.shape):
        wanted = s.recompute if isinstance(s.recompute, str) else shown(s.recompute)
        yield Problem(
            field,
            f"is true, but recompute is {wanted}, and only recomputed layers save their input "
            "alone; legal: false, or strategy.recompute: full, or a list of layers",
        )


_NOTHING = "no module that saves more than its inputs (a GEMM and a norm save no more)"


def _around(path: str) -> Iterator[str]:
    """Paths of the modules that `path` lies within."""
    while path := path.rpartition(".")[0]:
        yield path


def _sites(shape: Shape) -> list[str]:
    """Modules that may be recomputed: they save more than their inputs, in any strategy."""
    return [path for layer in range(shape.layers) for path in _layer_sites(shape, layer)]


def _layer_sites(shape: Shape, layer: int) -> Iterator[str]:
    dense = shape.moe is None or layer < shape.moe.first_dense
    parts = ("attention", "attention.attend", "mlp", *(("mlp.activate",) if dense else ()))
    yield from (f"blocks.{layer}", *(f"blocks.{layer}.{part}" for part in parts))


def _legal(sites: list[str]) -> str:
    """The sites, of all layers at once."""
    generic = (".".join("*" if p.isdigit() else p for p in path.split(".")) for path in sites)
    return ", ".join(dict.fromkeys(generic))
