"""A traced graph as JSON, and back: what a process that traces tells one without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from workbench.plan.operators.traced.traced_graph import (
    TensorRef,
    TracedGraph,
    TracedNode,
    TracedTensor,
)


@dataclass(frozen=True)
class TracedModel:
    """What is known of a user's module once it is traced.

    Attributes:
        graph: At the shape of a microbatch.
        parameters: Name -> shape, in the module's order, tied ones once.
        buffer_bytes: Of all buffers.
    """

    graph: TracedGraph
    parameters: Mapping[str, tuple[int, ...]]
    buffer_bytes: int


def model_to_json(model: TracedModel) -> dict[str, Any]:
    """The model as plain data."""
    shapes = {name: list(shape) for name, shape in model.parameters.items()}
    graph = _graph_to_json(model.graph)
    return {"graph": graph, "parameters": shapes, "buffer_bytes": model.buffer_bytes}


def model_from_json(data: Mapping[str, Any]) -> TracedModel:
    """The model that `model_to_json` wrote."""
    shapes = {name: tuple(shape) for name, shape in data["parameters"].items()}
    return TracedModel(_graph(data["graph"]), shapes, int(data["buffer_bytes"]))


def _graph_to_json(graph: TracedGraph) -> dict[str, Any]:
    nodes = [_node_to_json(node) for node in graph.nodes]
    larger = None if graph.larger is None else _graph_to_json(graph.larger)
    own = asdict(replace(graph, nodes=(), larger=None))
    return own | {"nodes": nodes, "output": _to_json(graph.output), "larger": larger}


def _graph(data: Mapping[str, Any]) -> TracedGraph:
    own = dict(data)
    own["inputs"] = {name: _tensor(each) for name, each in own["inputs"].items()}
    own["nodes"] = tuple(_node(each) for each in own["nodes"])
    own["constants"] = tuple(own["constants"])
    own["output"] = _from_json(own["output"])
    own["larger"] = None if own["larger"] is None else _graph(own["larger"])
    return TracedGraph(**own)


def _node_to_json(node: TracedNode) -> dict[str, Any]:
    own = asdict(node)
    own["args"] = [_to_json(each) for each in node.args]
    own["kwargs"] = {name: _to_json(each) for name, each in node.kwargs.items()}
    return own


def _to_json(value: Any) -> Any:
    if isinstance(value, TensorRef):
        return {"source": value.source, "index": value.index}
    return [_to_json(each) for each in value] if isinstance(value, tuple) else value


def _node(data: Mapping[str, Any]) -> TracedNode:
    own = dict(data)
    own["args"] = tuple(_from_json(each) for each in own["args"])
    own["kwargs"] = {name: _from_json(each) for name, each in own["kwargs"].items()}
    own["outputs"] = tuple(_tensor(each) for each in own["outputs"])
    return TracedNode(**own)


def _from_json(value: Any) -> Any:
    if isinstance(value, dict):
        return TensorRef(**value)
    return tuple(_from_json(each) for each in value) if isinstance(value, list) else value


def _tensor(data: Mapping[str, Any]) -> TracedTensor:
    return TracedTensor(tuple(data["shape"]), data["dtype"])
