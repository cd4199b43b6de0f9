"""The operators of a pipeline stage: the inner of Alpa's two levels (2201.12023, section 5)
searches them for each number of layers, with and without the model's ends.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from workbench.plan.model.model_shape import Shape
from workbench.plan.operators.operator_graph import OperatorGraph
from workbench.planner.autoshard.layer_operators import model_graph

FIRST, LAST = ("embedding", "embedding.norm"), ("final_norm", "head", "loss")


def stage_graph(
    shape: Shape, sequences: int, length: int, num_layers: int, first: bool, last: bool
) -> OperatorGraph:
    """The operators of `num_layers` layers, with the embedding if it is the `first` stage and the
    head if it is the `last`. `leading_layers` are all on the first stage.
    """
    changes: dict[str, Any] = {"layers": num_layers, "tied": shape.tied and first and last}
    if shape.moe is not None and leading_layers(shape) and not first:
        changes["moe"] = shape.moe.model_copy(update={"first_dense": 0})
    of_stage = shape.model_copy(update=changes)
    whole = model_graph(of_stage, sequences, length, fused=True)
    left_out = (() if first else FIRST) + (() if last else LAST)
    kept = [i for i, op in enumerate(whole.operators) if op.name not in left_out]
    at = {old: new for new, old in enumerate(kept)}
    edges = (
        replace(edge, source=at[edge.source], target=at[edge.target])
        for edge in whole.edges
        if edge.source in at and edge.target in at
    )
    return OperatorGraph(tuple(whole.operators[i] for i in kept), tuple(edges))


def leading_layers(shape: Shape) -> int:
    """Layers without experts before those that have some; 0 where all layers are alike."""
    return shape.first_dense if shape.first_dense < shape.layers else 0
