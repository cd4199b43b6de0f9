"""Layers of each pipeline stage as frameworks deal them, where they do not balance them as the
planner does.
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import pairwise
from typing import Any

from workbench import data_files
from workbench.plan.model.model_shape import Shape

LAYOUTS_FILE = "data/validation/pipeline_layouts.yaml"


def layers_of_stages(
    partition: str, model: Shape, stages: int, published: Shape | None = None
) -> list[int] | None:
    """Layers of each of `stages`; None where the planner's own balance is taken.

    Args:
        partition: How the framework deals layers, as its profile says: `even`, by their number;
            `even-with-ends`, the same, but embedding and head count as a layer each where stages
            do not divide the layers alone; `cumulative`, by weights; `balanced`.
        model: The shape that is split.
        stages: Ranks of the pipeline times chunks of each.
        published: The catalog's shape of the model, for which recipes may have a layout.
    """
    if stages == 1:
        return None
    if partition == "even-with-ends":
        recipe = recipe_layout(published.name, stages) if published else None
        if recipe is not None:
            return [*recipe[:-1], recipe[-1] + model.layers - sum(recipe)]
        if model.layers % stages and (model.layers + 2) % stages == 0:
            each = (model.layers + 2) // stages
            return [each - 1, *[each] * (stages - 2), each - 1]
    if stages > model.layers:
        return None
    if partition.startswith("even"):
        less, more = divmod(model.layers, stages)
        return [less + (stage < more) for stage in range(stages)]
    return cumulative_partition(model, stages) if partition == "cumulative" else None


@lru_cache(maxsize=256)
def recipe_layout(model: str, stages: int) -> tuple[int, ...] | None:
    """Layers of each stage that public recipes give a published model; None where they give
    none. A layer that predicts a further token is not among them: it follows in the last stage.
    """
    table: list[dict[str, Any]] = data_files.read_data_file(LAYOUTS_FILE)
    found = [one["layers"] for one in table if one["model"] == model]
    return next((tuple(layers) for layers in found if len(layers) == stages), None)


def cumulative_partition(model: Shape, stages: int) -> list[int]:
    """Layers of each stage where one ends as soon as the weights so far reach its share; the head
    weighs too.
    """
    layer = model.hidden * (4 * model.q_width + (3 if model.gated else 2) * model.ffn)
    share = (model.layers * layer + model.vocab * model.hidden) / (stages * layer)
    ends = [
        min(math.ceil(share * (stage + 1) - 1e-9), model.layers - stages + stage + 1)
        for stage in range(stages - 1)
    ]
    return [after - before for before, after in pairwise([0, *ends, model.layers])]
