"""Verbs that list the catalog: models, GPUs, strategies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

Row = dict[str, Any]


class Listing(list[Row]):
    """Entries of the catalog as plain data, which show themselves as a table."""

    def __init__(
        self,
        title: str,
        rows: Iterable[Row],
        columns: Mapping[str, Callable[[Row], object]],
        figures: Iterable[str] = (),
        optional: Iterable[str] = (),
    ) -> None:
        super().__init__(rows)
        self.title, self.columns, self.note = title, columns, ""
        self.figures, self.optional = tuple(figures), tuple(optional)

    def cells(self) -> list[tuple[str, ...]]:
        """One row an entry, under the names of `columns`."""
        return [tuple(str(cell(row)) for cell in self.columns.values()) for row in self]

    def __repr__(self) -> str:
        from workbench.planner.table_text import aligned_lines

        lines = aligned_lines([tuple(self.columns), *self.cells()], left=0)
        return "\n".join([self.title, *lines, *filter(None, [self.note])])

    def _repr_html_(self) -> str:
        from workbench.planner.table_text import captioned_html_table

        return captioned_html_table(self.title, tuple(self.columns), self.cells())


def models() -> Listing:
    """List models by name: shape, parameters, source."""
    from workbench.plan.catalog import catalog
    from workbench.plan.model.parameter_count import parameters

    rows = []
    for name, entry in catalog.models().items():
        counted = parameters(entry.shape)
        published = {"published_parameters": entry.parameters, "source": entry.source}
        counts = {"parameters": counted.total, "active_parameters": counted.active, **published}
        rows.append({**entry.shape.model_dump(), "name": name, **counts})
    return models_listing(rows)


def models_listing(rows: Iterable[Row]) -> Listing:
    """Models under their columns."""
    from workbench.units import count_text

    columns: dict[str, Callable[[Row], object]] = {
        "model": lambda row: row["name"],
        "parameters": lambda row: count_text(row["parameters"]),
        "layers": lambda row: row["layers"],
        "hidden": lambda row: row["hidden"],
        "heads": lambda row: row["heads"],
        "kv": lambda row: row["kv_heads"],
        "vocab": lambda row: row["vocab"],
        "positions": lambda row: row["positions"],
        "source": lambda row: row["source"],
    }
    return Listing("Models", rows, columns, tuple(columns)[1:7], ("source", "positions"))


def gpus() -> Listing:
    """List GPUs by name; `local` is what is attached here."""
    from workbench.errors import PlanError
    from workbench.machine import gpu_catalog
    from workbench.machine.attached import attached, local_cluster

    rows, found, note = [], attached(), ""
    try:
        gpu, fabric = local_cluster(found, 1)
        here = {"fabric": fabric.name, "attached": found.count, "notes": gpu.title}
        rows.append({**gpu.model_dump(), "name": "local", **here})
    except PlanError as error:  # a GPU that the catalog does not know; the others are listed
        note = str(error)
    for name, entry in gpu_catalog.gpus().items():
        own = {"name": name, "fabric": entry.fabric, "notes": entry.notes}
        rows.append(entry.gpu.model_dump() | own)
    listing = gpus_listing(rows)
    listing.note = note
    return listing


def gpus_listing(rows: Iterable[Row]) -> Listing:
    """GPUs under their columns."""
    from workbench.units import digits

    def peak(row: Row) -> str:
        rates = row["tflops"]
        return digits(rates.get("bf16") or rates.get("fp16") or rates.get("fp32"))

    columns: dict[str, Callable[[Row], object]] = {
        "GPU": lambda row: row["name"],
        "GiB": lambda row: digits(row["memory_gib"]),
        "GB/s": lambda row: digits(row["bandwidth_gbs"]),
        "16-bit TFLOP/s": peak,
        "link GB/s": lambda row: digits(row["link_gbs"]),
        "W": lambda row: digits(row["watts"]) if row["watts"] else "–",
        "fabric": lambda row: row["fabric"],
        "source": lambda row: row["source"],
    }
    return Listing("GPUs", rows, columns, tuple(columns)[1:6], ("source", "fabric"))


def strategies() -> Listing:
    """List strategies by name: source, whether it can run."""
    from workbench.plan.catalog import catalog
    from workbench.plan.rules.supported import runnable

    presets = catalog.strategies().items()
    return strategies_listing(
        {"name": name, "title": one.title, "source": one.source, "runnable": runnable(name)}
        for name, one in presets
    )


def strategies_listing(rows: Iterable[Row]) -> Listing:
    """Strategies under their columns."""
    columns: dict[str, Callable[[Row], object]] = {
        "strategy": lambda row: row["name"],
        "runs": lambda row: "yes" if row["runnable"] else "planned",
        "title": lambda row: row["title"],
        "source": lambda row: row["source"],
    }
    return Listing("Strategies", rows, columns, optional=("source",))
