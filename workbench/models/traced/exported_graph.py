"""An exported program as a traced graph of plain data."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from workbench.errors import refuse
from workbench.models.traced.node_names import node_names
from workbench.models.traced.value_dependence import value_dependent
from workbench.plan.operators.traced.traced_graph import (
    DEVICE,
    LOSS,
    TensorRef,
    TracedGraph,
    TracedNode,
    TracedTensor,
)

NO_EFFECT = ("_assert_tensor_metadata", "_assert_async", "_assert_scalar", "sym_constrain_range")
"""Checks that hold already where shapes are constants."""
AS_ANOTHER = {
    "view_as": ("view", "default"),
    "reshape_as": ("reshape", "default"),
    "expand_as": ("expand", "default"),
}
"""Operator that takes its shape from a second tensor -> the one, and its overload, that is given
the shape.
"""
RANDOM = (
    "rand",
    "randn",
    "randint",
    "rand_like",
    "randn_like",
    "bernoulli",
    "multinomial",
    "alpha_dropout",
    "feature_dropout",
    "feature_alpha_dropout",
)
"""Operators that draw numbers; dropout alone is drawn alike on every mesh."""


def graph_of(
    program: ExportedProgram, model: nn.Module, with_loss: bool
) -> tuple[TracedGraph, dict[str, Tensor]]:
    """An exported program as a graph, and its constants by id.

    Args:
        program: What `torch.export` returns.
        model: The module that it was traced from.
        with_loss: Whether the module returns the loss; else it is added.

    Raises:
        PlanError: It draws random numbers other than by dropout, writes a buffer, or returns
            several tensors.
    """
    first = _first_names(model)
    ids: dict[str, str] = {}
    parameters, buffers, constants, given = {}, {}, {}, []
    for spec in program.graph_signature.input_specs:
        name = ids[spec.arg.name] = spec.arg.name
        if spec.kind == InputKind.PARAMETER:
            parameters[name] = first[str(spec.target)]
        elif spec.kind == InputKind.BUFFER:
            buffers[name] = first[str(spec.target)]
        elif spec.kind == InputKind.CONSTANT_TENSOR:
            constants[name] = program.constants[str(spec.target)]
        elif spec.kind == InputKind.USER_INPUT:
            given.append(name)
    inputs = {
        node.name: _tensor(node.meta["val"], node)
        for node in program.graph.nodes
        if node.op == "placeholder"
    }
    refs: dict[fx.Node, TensorRef] = {
        node: TensorRef(node.name) for node in program.graph.nodes if node.op == "placeholder"
    }
    nodes = _nodes(program, refs)
    result = next(node for node in program.graph.nodes if node.op == "output").args[0]
    if changed := sorted({*program.graph_signature.buffers_to_mutate.values()}):
        raise refuse(
            "model.python",
            f"its forward writes the buffer {', '.join(changed)}, which every rank would do of its "
            "own sequences; legal: buffers that it only reads",
        )
    if len(result) != 1 or result[0] not in refs:
        legal = "the summed loss alone" if with_loss else "the logits alone"
        raise refuse("model.python", f"its forward returns several tensors; legal: {legal}")
    output = refs[result[0]]
    targets = given[1] if with_loss else None
    graph = TracedGraph(
        given[0], targets, parameters, buffers, tuple(constants), inputs, nodes, output
    )
    return (graph if with_loss else _with_loss(graph)), constants


def _first_names(model: nn.Module) -> dict[str, str]:
    """Name of each parameter and buffer -> the first name of the same tensor."""
    first: dict[int, str] = {}
    names = {}
    for found in (model.named_parameters, model.named_buffers):
        for name, value in found(remove_duplicate=False):
            names[name] = first.setdefault(id(value), name)
    return names


def _with_loss(graph: TracedGraph) -> TracedGraph:
    """The graph with the loss behind the logits, summed over tokens."""
    tokens, logits = graph.inputs[graph.tokens], graph.tensors()[graph.output]
    node = TracedNode(
        LOSS,
        LOSS,
        "head_loss",
        "",
        (graph.output, TensorRef("targets")),
        {},
        (TracedTensor((), logits.dtype),),
    )
    return TracedGraph(
        graph.tokens,
        "targets",
        graph.parameters,
        graph.buffers,
        graph.constants,
        {**graph.inputs, "targets": tokens},
        (*graph.nodes, node),
        TensorRef(LOSS),
    )


def _nodes(program: ExportedProgram, refs: dict[fx.Node, TensorRef]) -> tuple[TracedNode, ...]:
    """Operators in order; `refs` gains their results."""
    found: list[TracedNode] = []
    for node in program.graph.nodes:
        if node.op != "call_function" or _name(node) in NO_EFFECT:
            continue
        if _name(node) == "getitem":
            source, index = node.args
            refs[node] = TensorRef(refs[source].source, int(index))
            continue
        refs[node] = TensorRef(node.name)
        if _name(node) in RANDOM:
            raise refuse(
                "model.python",
                f"draws random numbers by {_name(node)} in {_line(node)}, on every rank otherwise; "
                "legal: dropout",
            )
        stack = list(node.meta.get("nn_module_stack", {}).values())
        value = node.meta["val"]
        outputs = value if isinstance(value, tuple | list) else (value,)
        op, overload = _name(node), node.target._overloadname
        args = node.args
        if op == "native_dropout":  # what `dropout` is where writes in place were taken out
            op, outputs = "dropout", outputs[:1]
        if op in AS_ANOTHER:
            op, overload, args = *AS_ANOTHER[op], (args[0], [*value.shape])
        found.append(
            TracedNode(
                node.name,
                "",
                op,
                overload,
                tuple(_argument(each, refs) for each in args),
                {k: _argument(v, refs) for k, v in node.kwargs.items() if v is not None},
                tuple(_tensor(each, node) for each in outputs),
                str(stack[-1][0]).partition("@")[0] if stack else "",
                _line(node),
            )
        )
    return node_names(found)


def _argument(value: Any, refs: Mapping[fx.Node, TensorRef]) -> Any:
    if isinstance(value, fx.Node):
        return refs[value]
    if isinstance(value, list | tuple):
        return tuple(_argument(each, refs) for each in value)
    if isinstance(value, torch.device):
        return DEVICE
    if isinstance(value, torch.dtype | torch.memory_format | torch.layout):
        return str(value)
    return value


def _tensor(value: Any, node: fx.Node) -> TracedTensor:
    where = f"{_line(node)} ({_name(node)})"
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        raise value_dependent("traced", f"{where} makes a number of a tensor's values")
    if not isinstance(value, Tensor):
        raise refuse(
            "model.python",
            f"computes a {type(value).__name__} of tensors in {where}; legal: tensors",
        )
    if any(isinstance(length, torch.SymInt) for length in value.shape):
        raise value_dependent("traced", f"{where} has a result whose shape its values decide")
    return TracedTensor(tuple(value.shape), str(value.dtype))


def writes_in_place(program: ExportedProgram) -> bool:
    """Whether an operator writes into its input."""
    calls = (_name(node) for node in program.graph.nodes if node.op == "call_function")
    return any(name.endswith("_") and not name.endswith("__") for name in calls)


def _name(node: fx.Node) -> str:
    target: Any = node.target
    return str(getattr(target, "_opname", getattr(target, "__name__", target)))


def _line(node: fx.Node) -> str:
    """The innermost line of the user's own code: torch's is left out."""
    for text in reversed((node.meta.get("stack_trace") or "").splitlines()):
        if text.lstrip().startswith("File ") and not of_torch(text):
            file, line = text.split('"')[1], text.split("line ")[1].split(",")[0]
            return f"{Path(file).name}:{line}"
    return ""


def of_torch(path: str) -> bool:
    """Whether a path is torch's own."""
    return str(Path(torch.__file__).parent) in path
