"""Commands about what there is: models, cards, strategies."""

from __future__ import annotations

from typing import Any

from workbench.cli import tables
from workbench.cli.options import Json, emit
from workbench.cli.terminal import tell
from workbench.errors import PlanError
from workbench.machine import gpu_catalog
from workbench.machine.attached import attached, local_cluster
from workbench.plan.catalog import catalog
from workbench.plan.parameter_count import parameters
from workbench.plan.rules.supported import runnable


def models(json: Json = False) -> None:
    """Models by name: shape, parameters, source."""
    rows = []
    for name, entry in catalog.models().items():
        counted = parameters(entry.shape)
        published = {"published_parameters": entry.parameters, "source": entry.source}
        counts = {"parameters": counted.total, "active_parameters": counted.active, **published}
        rows.append({**entry.shape.model_dump(), "name": name, **counts})
    emit(json, rows, tables.models(rows))


def gpus(json: Json = False) -> None:
    """Cards by name, and what is attached here as `local`."""
    rows = _local()
    for name, entry in gpu_catalog.gpus().items():
        rows.append(
            {**entry.gpu.model_dump(), "name": name, "fabric": entry.fabric, "notes": entry.notes}
        )
    emit(json, rows, tables.gpus(rows))


def _local() -> list[dict[str, Any]]:
    found = attached()
    try:
        card, fabric = local_cluster(found, 1)
    except (
        PlanError
    ) as error:  # a card that the catalog does not know: the rest of the list is still good
        tell(str(error))
        return []
    return [
        {
            **card.model_dump(),
            "name": "local",
            "fabric": fabric.name,
            "attached": found.count,
            "notes": card.title,
        }
    ]


def strategies(json: Json = False) -> None:
    """Strategies by name, the paper or system of each, and whether this version can run it."""
    rows = [
        {"name": name, "title": preset.title, "source": preset.source, "runnable": runnable(name)}
        for name, preset in catalog.strategies().items()
    ]
    emit(json, rows, tables.strategies(rows))
