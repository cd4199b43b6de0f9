"""Operator graphs as JSON: who traces a module passes them to a process that loads no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from workbench.plan.operators.operator_graph import (
    Operator,
    OperatorDim,
    OperatorGraph,
    OperatorTensor,
    TensorEdge,
)


def graph_to_json(graph: OperatorGraph) -> dict[str, Any]:
    """Plain data."""
    return asdict(graph)


def graph_from_json(data: Mapping[str, Any]) -> OperatorGraph:
    """The graph that `graph_to_json` wrote."""
    return OperatorGraph(tuple(map(_operator, data["operators"])), tuple(map(_edge, data["edges"])))


def _operator(data: Mapping[str, Any]) -> Operator:
    parts = {
        "dims": tuple(OperatorDim(**dim) for dim in data["dims"]),
        "inputs": tuple(map(_tensor, data["inputs"])),
        "output": _tensor(data["output"]),
        "gemm_widths": tuple(data["gemm_widths"]),
        "sums": tuple(map(_tensor, data["sums"])),
        "named": tuple(map(tuple, data["named"])),
        "modules": tuple(data["modules"]),
    }
    return Operator(**{**data, **parts})


def _edge(data: Mapping[str, Any]) -> TensorEdge:
    tensors = {name: _tensor(data[name]) for name in ("source_tensor", "target_tensor")}
    return TensorEdge(**{**data, **tensors})


def _tensor(data: Mapping[str, Any]) -> OperatorTensor:
    return OperatorTensor(**{**data, "dims": tuple(data["dims"])})
