"""Catalog models, small, under operator strategies beside recompute, pipeline and ZeRO.

`python -m tests.parallel.operator_table` verifies each model that runs, of its own proportions
(heads to key-value heads, gated or not, tied, norms, biases, positions, experts), against one
device, and prints a table: the largest relative difference of loss, gradients and weights in fp64,
or why a plan is refused. Models of equal proportions are one row.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tests.parallel.operator_strategies import columns_before_rows
from workbench.engine.verify.equivalence import verify
from workbench.errors import PlanError
from workbench.plan.catalog import catalog
from workbench.plan.model.model_shape import Shape
from workbench.plan.rules.supported import require, unsupported
from workbench.plan.schema import Plan

COLUMNS: dict[str, dict[str, Any]] = {
    "operators": {},
    "recompute": {"strategy.recompute": "full"},
    "pipeline": {"strategy.pipeline.size": 2, "cluster.gpus": 4},
    "ZeRO-1": {"strategy.data.zero": 1, "cluster.gpus": 4},
    "ZeRO-2": {"strategy.data.zero": 2, "cluster.gpus": 4},
    "ZeRO-3": {"strategy.data.zero": 3, "cluster.gpus": 4},
}
"""Column of the table -> the plan's changes; the ranks left over are data parallel."""
RANKS = 2
HEAD_WIDTH = 8
MARK = "\\*"
"""Behind the name of a model that does not run as it is."""


def catalog_shapes() -> dict[str, Shape]:
    """Name of a catalog model -> its shape."""
    return {name: _plan({"model": name}).resolve().shape for name in catalog.models()}


def refusals(name: str, column: str | None = None) -> list[str]:
    """Why a catalog model does not run at all, operators or not; or in a `column`, in small."""
    plan = _plan({"model": name})
    if column is not None:
        plan = small_plan(shrunk(plan.resolve().shape), column)
    problems = unsupported(plan.resolve(), "run")
    return [f"{p.field} {p.message.partition(';')[0]}" for p in problems]


def refused_beside(shape: Shape) -> bool:
    """Whether operators alone refuse a model that runs without them."""
    return shape.positions == "alibi" or shape.qk_norm is not None or shape.mla is not None


def shrunk(shape: Shape) -> dict[str, Any]:
    """A model of two layers with the proportions of `shape`."""
    kv_heads = _few(int(shape.kv_heads or shape.heads))
    heads = kv_heads * min(4, shape.heads // int(shape.kv_heads or shape.heads))
    hidden = HEAD_WIDTH * heads
    kept = ("norm", "mlp", "biases", "positions", "tied", "embedding_norm", "qk_norm")
    small = {name: getattr(shape, name) for name in kept} | {
        "layers": 2,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": kv_heads,
        "ffn": 8 * max(1, round(hidden * min(4.0, shape.ffn / shape.hidden) / 8)),
        "vocab": 258 - shape.vocab % 2,
        "max_positions": 64,
    }
    if shape.rope_scaling is not None:
        small["rope_scaling"] = {**shape.rope_scaling.model_dump(), "original_positions": 32}
    if shape.mla is not None:
        small["mla"] = {"kv_rank": 8, "rope_dim": 4, "nope_dim": 8, "value_dim": 8}
    if shape.moe is None:
        return small
    own = shape.moe
    experts = {"experts": 4, "top_k": min(2, own.top_k), "ffn": 16, "shared": min(1, own.shared)}
    return small | {"moe": {**experts, "first_dense": min(1, own.first_dense)}}


def _few(heads: int) -> int:
    """As many, up to four, with the same remainder on two ranks."""
    return min(heads, 4 - heads % 2)


def small_plan(model: dict[str, Any], column: str) -> Plan:
    """The plan of a cell, of a shrunk model."""
    plan = _plan({"model": model})
    operators = columns_before_rows(plan.resolve().shape, RANKS)
    tensor = {"cluster.gpus": RANKS, "strategy.tensor.size": RANKS}
    return plan.replace(**{**tensor, "strategy.operators": operators, **COLUMNS[column]})


def _plan(written: dict[str, Any]) -> Plan:
    return Plan.model_validate(
        {
            "cluster": {"gpu": "local", "gpus": 1},
            "strategy": {"data": {"bucket_mib": 0.01}},
            "training": {
                "sequence_length": 16,
                "global_batch": 8,
                "micro_batch": 2,
                "steps": 3,
                "optimizer": {"clip": 0.5, "learning_rate": 1e-2},
            },
            **written,
        }
    )


def proportions() -> dict[str, dict[str, Any]]:
    """Names of the models, those of equal proportions together -> their small model, which has
    neither sliding windows nor what no shape says (`MARK`): only what changes no proportion.
    """
    rows: dict[str, tuple[list[str], dict[str, Any]]] = {}
    for name, shape in catalog_shapes().items():
        small = shrunk(shape)
        if not refused_beside(shape) and not unsupported(_plan({"model": small}).resolve(), "run"):
            names, _ = rows.setdefault(str(small), ([], small))
            names.append(name + MARK * bool(refusals(name)))
    return {", ".join(names): small for names, small in rows.values()}


def cell(model: dict[str, Any], column: str) -> str:
    """The largest relative difference, or the refusal."""
    plan = small_plan(model, column)
    try:
        require(plan.resolve(), "run")
    except PlanError as error:
        return f"refused: {error.problems[0].field}"
    answer = verify(plan, "fp64")
    worst = max(answer["max_relative_diff"].values())
    return f"{worst:.0e}" if answer["passed"] else f"FAILS, {answer['worst']['tensor']}"


def table() -> Iterator[str]:
    """The lines of the table, as they are found."""
    yield f"| model | {' | '.join(COLUMNS)} |"
    yield f"|---|{'---|' * len(COLUMNS)}"
    for names, small in proportions().items():
        yield f"| {names} | {' | '.join(cell(small, column) for column in COLUMNS)} |"
    idle: dict[str, list[str]] = {}
    for name in catalog.models():
        beside = refused_beside(catalog_shapes()[name])
        if fields := refusals(name, "operators" if beside else None):
            idle.setdefault(", ".join(fields), []).append(name)
    yield ""
    for why, idlers in idle.items():
        yield f"- {', '.join(idlers)}: {why}"


if __name__ == "__main__":
    torch.set_num_threads(1)
    for line in table():
        print(line, flush=True)
