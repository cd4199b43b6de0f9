"""Commands about one plan: declaring, estimating, rehearsing, proving, exporting."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from workbench import verbs
from workbench.cli import tables
from workbench.cli.options import AllowCode, Json, emit, planned
from workbench.cli.output_files import write_whole
from workbench.cli.progress import waiting
from workbench.errors import refuse
from workbench.plan.catalog import catalog, huggingface_config
from workbench.plan.plan_diff import diff
from workbench.plan.schema import Plan
from workbench.untrusted_text import shown


@planned
def plan(
    plan: Plan,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write the plan file here.")
    ] = None,
    complete: Annotated[
        bool, typer.Option("--complete", help="Every default and size written out.")
    ] = False,
    against: Annotated[
        Path | None, typer.Option("--diff", help="Show what differs from this plan.")
    ] = None,
    json: Json = False,
) -> None:
    """Declare a plan, check it, show what it means, write it to a file."""
    full = plan.resolve()
    text = (full if complete else plan).to_yaml()
    if output is not None:
        write_whole(output, text)
    data: dict[str, Any] = {
        "plan": full.model_dump(),
        "sizes": full.sizes,
        "world_size": full.world_size,
    }
    if output is not None:
        data["path"] = str(output)
    shown: list[Any] = [tables.plan(full), None if output else Text(text.rstrip())]
    if isinstance(plan.model, str) and plan.model not in catalog.models():
        made = huggingface_config.account(plan.model)
        data["config"] = asdict(made)
        shown.append(Text("\n".join([f"{plan.model}:", *(f"  {line}" for line in made.lines())])))
    if against is not None:
        rows = diff(Plan.load(against).resolve(), full)
        data["diff"] = [{"field": f, "other": a, "this": b} for f, a, b in rows]
        shown = [tables.differences(rows, str(against))]
    emit(json, data, *shown)


@planned
def estimate(plan: Plan, json: Json = False) -> None:
    """What a plan will cost on any cluster, in closed form: memory by category, time of a step,
    whether it fits.
    """
    found = verbs.estimate(
        plan
    )  # not the complete plan: advice must be free to change what follows from a change
    emit(
        json,
        found.summary(),
        tables.plan(plan.resolve()),
        tables.profile(found),
        tables.stages(found),
        tables.notes(found),
    )


@planned
def rehearse(
    plan: Plan,
    ranks: Annotated[
        str | None, typer.Option("--ranks", help="Ranks, e.g. 0,7; default one a stage.")
    ] = None,
    allow_code: AllowCode = False,
    json: Json = False,
) -> None:
    """Run the real code of a plan on fake tensors: peak memory and every collective, at any world
    size.
    """
    full = plan.resolve()
    wanted = None if ranks is None else _ranks(ranks, full.world_size)
    with waiting("rehearsing") as told:
        found = verbs.rehearse(
            full,
            wanted,
            lambda done, of: told(f"rehearsing, rank {done} of {of}"),
            allow_code=allow_code,
        )
    emit(
        json,
        found.summary(),
        tables.plan(full),
        tables.profile(found),
        tables.stages(found),
        tables.collectives(found),
    )


def _ranks(text: str, world_size: int) -> list[int]:
    try:
        ranks = [int(word) for word in text.split(",")]
    except ValueError:
        raise refuse(
            "--ranks", f"{shown(text)} is no list of ranks; legal: numbers with commas, e.g. 0,1"
        ) from None
    outside = [rank for rank in ranks if not 0 <= rank < world_size]
    if outside:
        raise refuse(
            "--ranks",
            f"{shown(outside)} outside the world of {world_size}; legal: 0 to {world_size - 1}",
        )
    return ranks


@planned
def verify(
    plan: Plan,
    precision: Annotated[str, typer.Option("--precision", help="fp64 or fp32.")] = "fp64",
    allow_code: AllowCode = False,
    json: Json = False,
) -> None:
    """Prove that a plan computes what one device does: same seed, then loss, gradients and weights
    compared.
    """
    if precision not in ("fp64", "fp32"):
        raise refuse("--precision", f"is '{precision}'; legal: fp64, fp32")
    with waiting("training on one device, and under the plan"):
        found = verbs.verify(plan, "fp64" if precision == "fp64" else "fp32", allow_code=allow_code)
    emit(json, found, tables.proof(found))
    if not found["passed"]:
        raise typer.Exit(1)


@planned
def export(
    plan: Plan,
    to: Annotated[Path, typer.Option("--to", help="Folder to write into.")],
    json: Json = False,
) -> None:
    """Write a plan with all that launches it: resolved plan, accelerate.yaml, launch.sh, Slurm
    job.sbatch.
    """
    paths = verbs.export(plan, to)
    emit(
        json, {"files": [str(path) for path in paths]}, Text("\n".join(str(path) for path in paths))
    )
