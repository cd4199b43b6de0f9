"""What the states are counted of: a number of parameters, a model's name, a plan file or a plan."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workbench.errors import refuse, unknown_name
from workbench.fields.bounds import LAYERS
from workbench.plan.catalog.catalog import models
from workbench.plan.model.model_shape import Shape
from workbench.plan.model.parameter_count import parameters
from workbench.plan.schema import Plan, build_plan

SUFFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}
"""Of a number of parameters as it is written: 1.4B, 350M."""
PARAMETERS = (1e6, 1e15)
"""Fewest and most: one layer of the narrowest models, a thousand times the largest published."""
MODEL_ALONE = {
    "cluster": {"gpu": "h100-sxm-80gb", "gpus": 1},
    "training": {"micro_batch": 1, "global_batch": 1},
}
"""What stands beside a model of which no plan is given."""
NUMBER = re.compile(r"([+-]?(?:[0-9.]+(?:e[+-]?[0-9]+)?|nan|inf))\s*([kmbgt]?)", re.IGNORECASE)


def subject_plan(subject: Plan | str | Path | float, changes: Mapping[str, Any]) -> Plan:
    """The plan whose states are counted; of a model alone with defaults, on one H100.

    Args:
        subject: A number of parameters (100e9, '100B'), a model of the catalog, the path of a plan
            file, or a plan.
        changes: Fields to override, by dotted path.

    Raises:
        PlanError: It is none of these, or a field is illegal.
    """
    if isinstance(subject, Plan):
        return subject.replace(**changes)
    if (count := number_of_parameters(subject)) is not None:
        return _of_model(shape_of_size(count).model_dump(exclude_defaults=True), changes)
    text = str(subject)
    if text in models():
        return _of_model(text, changes)
    if Path(text).suffix in (".yaml", ".yml", ".json"):
        return Plan.load(text).replace(**changes)
    if re.match(r"[-+]?\.?[0-9]", text):
        raise refuse("SUBJECT", f"'{text}' is no number of parameters; legal: e.g. 100e9 or 1.4B")
    raise unknown_name("model", text, models())


def _of_model(model: Any, changes: Mapping[str, Any]) -> Plan:
    return build_plan({"model": model, **MODEL_ALONE}).replace(**changes)


def number_of_parameters(subject: str | Path | float) -> float | None:
    """A number of parameters; None where the subject is no number."""
    if isinstance(subject, int | float):
        count = float(subject)
    elif found := NUMBER.fullmatch(str(subject).strip()):
        try:
            count = float(found[1]) * SUFFIXES[found[2].lower()]
        except ValueError:  # such as 1.2.3
            return None
    else:
        return None
    least, most = PARAMETERS
    if not least <= count <= most:  # NaN is neither
        raise refuse("parameters", f"is {count:g}; legal: {least:g} to {most:g}")
    return count


def shape_of_size(count: float) -> Shape:
    """The dense model of the catalog that is nearest to a number of parameters, with as many layers
    as come nearest to it.
    """
    dense = [entry.shape for entry in models().values() if entry.shape.moe is None]
    near = min(dense, key=lambda shape: abs(math.log(parameters(shape).total / count)))
    total = parameters(near).total
    layer = (total - parameters(near.model_copy(update={"layers": 1})).total) / (near.layers - 1)
    layers = min(LAYERS.most, max(1, near.layers + round((count - total) / layer)))
    if layers == near.layers:
        return near
    return near.model_copy(update={"layers": layers, "name": f"{near.name} with {layers} layers"})
