"""Commands that list the catalog: models, GPUs, strategies."""

from __future__ import annotations

from typing import Any

from workbench.cli import tables
from workbench.cli.options import Json, emit
from workbench.cli.terminal import print_message
from workbench.errors import PlanError
from workbench.machine import gpu_catalog
from workbench.machine.attached import attached, local_cluster
from workbench.plan.catalog import catalog
from workbench.plan.model.parameter_count import parameters
from workbench.plan.rules.supported import runnable


def models(json: Json = False) -> None:
    rows = []
    for name, entry in catalog.models().items():
        counted = parameters(entry.shape)
        published = {"published_parameters": entry.parameters, "source": entry.source}
        counts = {"parameters": counted.total, "active_parameters": counted.active, **published}
        rows.append({**entry.shape.model_dump(), "name": name, **counts})
    emit(json, rows, lambda: [tables.models_table(rows)])


def gpus(json: Json = False) -> None:
    rows = _local()
    for name, entry in gpu_catalog.gpus().items():
        rows.append(
            {**entry.gpu.model_dump(), "name": name, "fabric": entry.fabric, "notes": entry.notes}
        )
    emit(json, rows, lambda: [tables.gpus_table(rows)])


def _local() -> list[dict[str, Any]]:
    found = attached()
    try:
        gpu, fabric = local_cluster(found, 1)
    except PlanError as error:  # a GPU that the catalog does not know; the others are listed
        print_message(str(error))
        return []
    return [
        {
            **gpu.model_dump(),
            "name": "local",
            "fabric": fabric.name,
            "attached": found.count,
            "notes": gpu.title,
        }
    ]


def strategies(json: Json = False) -> None:
    rows = [
        {"name": name, "title": preset.title, "source": preset.source, "runnable": runnable(name)}
        for name, preset in catalog.strategies().items()
    ]
    emit(json, rows, lambda: [tables.strategies_table(rows)])
