"""Commands about plans: the catalog, planning, estimating, rehearsing, proving, comparing, exporting."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from workbench import tables, verbs
from workbench.cli_options import Gpu, Gpus, Json, Model, PlanFile, Root, Set, Strategy, chosen, console, emit, writable
from workbench.cli_progress import finished, waiting
from workbench.plan import catalog
from workbench.plan.attached import attached, local_cluster
from workbench.plan.diff import diff
from workbench.plan.errors import PlanError, refuse
from workbench.plan.parameters import parameters
from workbench.plan.schema import Plan
from workbench.plan.support import runnable
from workbench.runs.ready import ready


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
    for name, entry in catalog.gpus().items():
        rows.append({**entry.card.model_dump(), "name": name, "fabric": entry.fabric, "notes": entry.notes})
    emit(json, rows, tables.gpus(rows))


def _local() -> list[dict[str, Any]]:
    found = attached()
    try:
        card, fabric = local_cluster(found, 1)
    except PlanError as error:  # a card that the catalog does not know: the rest of the list is still good
        console(stderr=True).print(str(error), markup=False, soft_wrap=True)
        return []
    return [{**card.model_dump(), "name": "local", "fabric": fabric.name, "attached": found.count, "notes": card.title}]


def strategies(json: Json = False) -> None:
    """Strategies by name, the paper or system of each, and whether this version can run it."""
    rows = [
        {"name": name, "title": preset.title, "source": preset.source, "runnable": runnable(name)}
        for name, preset in catalog.strategies().items()
    ]
    emit(json, rows, tables.strategies(rows))


def plan(
    file: PlanFile = None,
    model: Model = None,
    gpu: Gpu = None,
    gpus: Gpus = None,
    strategy: Strategy = None,
    set: Set = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write the plan file here.")] = None,
    complete: Annotated[bool, typer.Option("--complete", help="Every default and size written out.")] = False,
    against: Annotated[Path | None, typer.Option("--diff", help="Show what differs from this plan.")] = None,
    json: Json = False,
) -> None:
    """Declare a plan: check it, show what it means, write it to a file."""
    short = chosen(file, model, gpu, gpus, strategy, set)
    full = short.complete()
    text = (full if complete else short).to_yaml()
    if output is not None:
        write_whole(output, text)
    data: dict[str, Any] = {"plan": full.model_dump(), "sizes": full.sizes, "world_size": full.world_size}
    if output is not None:
        data["path"] = str(output)
    shown: list[Any] = [tables.plan(full), None if output else Text(text.rstrip())]
    if against is not None:
        rows = diff(Plan.load(against).complete(), full)
        data["diff"] = [{"field": f, "other": a, "this": b} for f, a, b in rows]
        shown = [tables.differences(rows, str(against))]
    emit(json, data, *shown)


def write_whole(path: Path, text: str) -> None:
    """Write `text` to `path`, or leave `path` as it was. Raises `PlanError` naming `--output`."""
    draft = None
    try:
        handle, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(draft, 0o644)
        os.replace(draft, path)
    except OSError as error:
        if draft:
            Path(draft).unlink(missing_ok=True)
        raise refuse("--output", f"'{path}' cannot be written: {error.strerror or error}") from None


def estimate(
    file: PlanFile = None,
    model: Model = None,
    gpu: Gpu = None,
    gpus: Gpus = None,
    strategy: Strategy = None,
    set: Set = None,
    json: Json = False,
) -> None:
    """What a plan will cost on any cluster, in closed form: memory by category, time of a step, whether it fits."""
    short = chosen(file, model, gpu, gpus, strategy, set)
    found = verbs.estimate(short)  # not the complete plan: advice must be free to change what follows from a change
    emit(
        json,
        found.summary(),
        tables.plan(short.complete()),
        tables.profile(found),
        tables.stages(found),
        tables.notes(found),
    )


def rehearse(
    file: PlanFile = None,
    model: Model = None,
    gpu: Gpu = None,
    gpus: Gpus = None,
    strategy: Strategy = None,
    set: Set = None,
    ranks: Annotated[str | None, typer.Option("--ranks", help="Ranks, e.g. 0,7; default one a stage.")] = None,
    json: Json = False,
) -> None:
    """Run the real code of a plan on fake tensors: peak memory and every collective, at any world size."""
    full = chosen(file, model, gpu, gpus, strategy, set).complete()
    wanted = None if ranks is None else _ranks(ranks, full.world_size)
    with waiting("rehearsing") as told:
        found = verbs.rehearse(full, wanted, lambda done, of: told(f"rehearsing, rank {done} of {of}"))
    emit(
        json, found.summary(), tables.plan(full), tables.profile(found), tables.stages(found), tables.collectives(found)
    )


def _ranks(text: str, world_size: int) -> list[int]:
    try:
        ranks = [int(word) for word in text.split(",")]
    except ValueError:
        raise refuse("--ranks", f"'{text}' is no list of ranks; legal: numbers with commas, e.g. 0,1") from None
    outside = [rank for rank in ranks if not 0 <= rank < world_size]
    if outside:
        raise refuse("--ranks", f"{outside} outside the world of {world_size}; legal: 0 to {world_size - 1}")
    return ranks


def verify(
    file: PlanFile = None,
    model: Model = None,
    gpu: Gpu = None,
    gpus: Gpus = None,
    strategy: Strategy = None,
    set: Set = None,
    precision: Annotated[str, typer.Option("--precision", help="fp64 or fp32.")] = "fp64",
    json: Json = False,
) -> None:
    """Prove a plan: train with the same seed on one device and under it, and compare loss, gradients and weights."""
    if precision not in ("fp64", "fp32"):
        raise refuse("--precision", f"is '{precision}'; legal: fp64, fp32")
    full = chosen(file, model, gpu, gpus, strategy, set)
    with waiting("training on one device, and under the plan"):
        found = verbs.verify(full, "fp64" if precision == "fp64" else "fp32")
    emit(json, found, tables.proof(found))
    if not found["passed"]:
        raise typer.Exit(1)


def compare(
    these: Annotated[list[str], typer.Argument(metavar="A B...", help="Plan files, run directories, names of runs.")],
    html: Annotated[Path | None, typer.Option("--html", help="Also write a report that opens offline.")] = None,
    train: Annotated[bool, typer.Option("--run", help="Run each plan first, one after the other.")] = False,
    rehearsed: Annotated[bool, typer.Option("--rehearse/--no-rehearse", help="Rehearse each plan too.")] = True,
    root: Root = None,
    json: Json = False,
) -> None:
    """Estimated, rehearsed and measured side by side, rank by rank, of any plans and runs."""
    items = verbs.opened(these, root)
    writable(html)
    if train:
        items = _runs_of(items, root)
    with waiting("comparing") as told:
        found = verbs.compare(*items, rehearsed=rehearsed, progress=told)
    try:
        page = found.to_html(html) if html else None
    except OSError as error:
        raise refuse("--html", f"'{html}' cannot be written: {error.strerror or error}") from None
    data = found.to_json() | ({"html": str(page)} if page else {})
    emit(json, data, Text(repr(found)), Text(f"report: {page}") if page else None)


def _runs_of(items: list[Any], root: Path | None) -> list[Any]:
    """Each plan's finished run in its place. All plans are checked before the first runs; the first failure ends it."""
    for item in items:
        if isinstance(item, Plan):
            ready(item, root=root)
    found = []
    for number, item in enumerate(items, start=1):
        if isinstance(item, Plan):
            told = f"{number} of {len(items)}: {item.complete().name}"
            item = finished(verbs.run(item, root=root), told)
        found.append(item)
    return found


def export(
    to: Annotated[Path, typer.Option("--to", help="Folder to write into.")],
    file: PlanFile = None,
    model: Model = None,
    gpu: Gpu = None,
    gpus: Gpus = None,
    strategy: Strategy = None,
    set: Set = None,
    json: Json = False,
) -> None:
    """Write a plan with all that launches it: resolved plan, accelerate.yaml, launch.sh, Slurm job.sbatch."""
    paths = verbs.export(chosen(file, model, gpu, gpus, strategy, set), to)
    emit(json, {"files": [str(path) for path in paths]}, Text("\n".join(str(path) for path in paths)))
