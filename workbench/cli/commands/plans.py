"""Commands about one plan: plan, estimate, rehearse, verify, export."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from workbench import verbs
from workbench.cli.options import AllowCode, Json, PlanOutput, emit, planned
from workbench.cli.output_files import writable, write_whole
from workbench.errors import refuse
from workbench.plan.catalog import catalog, gguf_config, huggingface_config
from workbench.plan.plan_diff import diff
from workbench.plan.schema import Plan
from workbench.safe_io.gguf_files import SUFFIX
from workbench.units import counted
from workbench.untrusted_text import shown

if TYPE_CHECKING:
    from workbench.cli.terminal import Grid
    from workbench.plan.resolved_plan import ResolvedPlan
    from workbench.profile import Profile
    from workbench.runs.launch.subprocess_verbs import VerifiedOn, VerifiedPrecision


@planned
def plan(
    plan: Plan,
    output: PlanOutput = None,
    complete: Annotated[
        bool, typer.Option("--complete", help="Every default and size written out.")
    ] = False,
    against: Annotated[
        Path | None, typer.Option("--diff", help="Show what differs from this plan.")
    ] = None,
    json: Json = False,
) -> None:
    full = plan.resolve()
    text = (full if complete else plan).to_yaml()
    if output is not None:
        write_whole(output, text)
    data: dict[str, Any] = {
        "plan": full.model_dump(),
        "sizes": full.sizes,
        "world_size": full.world_size,
    }
    lines = [] if output else [text.rstrip()]
    if output is not None:
        data["path"] = str(output)
    described = isinstance(plan.model, str) and plan.model not in catalog.models()
    if described and not full.profiled:
        gguf = str(plan.model).endswith(SUFFIX)
        read = gguf_config.gguf_account if gguf else huggingface_config.account
        made = read(str(plan.model))
        data["config"] = asdict(made)
        lines.append("\n".join([f"{plan.model}:", *(f"  {line}" for line in made.lines())]))
    if against is None:
        emit(json, data, lambda: [_tables().plan_table(full), *lines])
        return
    rows = diff(Plan.load(against).resolve(), full)
    data["diff"] = [{"field": f, "other": a, "this": b} for f, a, b in rows]
    emit(json, data, lambda: [_tables().differences_table(rows, str(against))])


def _tables() -> ModuleType:
    from workbench.cli import tables  # rich: not for --json

    return tables


@planned
def estimate(plan: Plan, allow_code: AllowCode = False, json: Json = False) -> None:
    # The plan as written: a resolved one holds the sizes that a change of the advice moves.
    found = verbs.estimate(plan, allow_code=allow_code)
    emit(json, found.summary(), lambda: _tables().estimate_table(plan.resolve(), found))


@planned
def rehearse(
    plan: Plan,
    ranks: Annotated[
        str | None, typer.Option("--ranks", help="Ranks, e.g. 0,7; default one a pipeline stage.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Instead check that no order of calls can hang.")
    ] = False,
    operators: Annotated[
        bool,
        typer.Option(
            "--operators",
            help="Also count GEMMs, attention and every other operator, and time them.",
        ),
    ] = False,
    fusion: Annotated[
        bool,
        typer.Option(
            "--fusion",
            help="Instead compare what memory-bound operators move: as primitive operators, eager, "
            "fused.",
        ),
    ] = False,
    timeline: Annotated[
        Path | None,
        typer.Option(
            "--timeline",
            help="Also write memory over a step to a CSV file, and say by module what lives at its "
            "peak and what a step leaks.",
        ),
    ] = None,
    allow_code: AllowCode = False,
    json: Json = False,
) -> None:
    from workbench.cli.progress import CountBar

    full = plan.resolve()
    if check and operators:
        raise refuse(
            "--operators", "is given with --check, which times nothing; legal: one of them"
        )
    if check and ranks is not None:
        raise refuse("--ranks", "is given with --check, which is of all ranks; legal: one of them")
    if check and timeline is not None:
        raise refuse(
            "--timeline", "is given with --check, which counts no memory; legal: one of them"
        )
    if fusion and (check or operators or timeline is not None):
        raise refuse(
            "--fusion",
            "is given with --check, --operators or --timeline, which are of one path; legal: one "
            "of them",
        )
    writable(timeline, "--timeline")
    if check:
        return _check_order(full, allow_code, json)
    wanted = None if ranks is None else _ranks(ranks, full.world_size)
    if fusion:
        return _compare_fusion(plan, wanted, allow_code, json)
    with CountBar("rehearsing", "actions") as bar:
        found = verbs.rehearse(
            full,
            wanted,
            bar,
            allow_code=allow_code,
            operators=operators,
            over_time=timeline is not None,
        )
    if timeline is not None:
        write_whole(timeline, found.levels.to_csv(index=False), "--timeline")
    emit(json, found.summary(), lambda: _rehearsal_tables(full, found))


def _compare_fusion(plan: Plan, ranks: list[int] | None, allow_code: bool, json: bool) -> None:
    from workbench.cli.operator_tables import fusion_tables
    from workbench.cli.progress import CountBar
    from workbench.planner.explain.kernel_fusion import both_kernels, kernel_fusion

    notes = []
    for own in both_kernels(plan):
        with CountBar(f"rehearsing {own.strategy.kernels}", "actions") as bar:
            rehearsed = verbs.rehearse(own, ranks, bar, allow_code=allow_code, operators=True)
        notes.append(rehearsed.notes["operators"])
    found = kernel_fusion(*notes)
    emit(json, found, lambda: fusion_tables(found))


def _rehearsal_tables(full: ResolvedPlan, found: Profile) -> list[Grid | str | None]:
    tables: list[Grid | str | None] = _tables().rehearsal_table(full, found)
    if counted := found.notes.get("operators"):
        from workbench.cli.operator_tables import operator_tables

        tables += operator_tables(counted)
    if "peak_allocations" in found.notes:
        from workbench.cli.living_tables import living_tables

        tables += living_tables(found)
    return [*tables, found.notes.get("base")]


def _check_order(plan: Plan, allow_code: bool, json: bool) -> None:
    from workbench.cli.progress import CountBar

    with CountBar("tracing", "ranks") as bar:
        found = verbs.check_order(plan, bar, allow_code=allow_code)
    emit(json, found, lambda: _order_lines(found))
    if found["problems"]:
        raise typer.Exit(1)


def _order_lines(found: dict[str, Any]) -> Iterator[str]:
    world, traced = found["world_size"], found["traced"]
    how = f"all {world} ranks traced"
    if traced < world:
        how = f"by symmetry, {traced} of {world} ranks traced"
    yield (
        f"order of calls (rehearsed): {found['calls']} collectives and P2P calls of "
        f"{counted(found['microbatches'], 'microbatch')}, {how}"
    )
    sure = "no rank can hang"
    if traced < world:
        sure += ", as far as ranks of a pipeline stage do alike (32 drawn ranks were compared)"
    yield from found["problems"] or [sure]


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
    precision: Annotated[
        str | None,
        typer.Option(
            "--precision",
            help="In which the plan is verified instead of its own: fp64 (default) or fp32; on "
            "GPUs fp32 (default) or bf16; of a plan in fp8: fp8.",
        ),
    ] = None,
    on: Annotated[
        str, typer.Option("--on", help="cpu, or gpu: the attached GPUs, launched as for a run.")
    ] = "cpu",
    allow_code: AllowCode = False,
    json: Json = False,
) -> None:
    from workbench.cli.progress import Status

    with Status("training on one device, and under the plan"):
        found = verbs.verify(
            plan,
            cast("VerifiedPrecision | None", precision),
            on=cast("VerifiedOn", on),
            allow_code=allow_code,
        )
    emit(
        json,
        found,
        lambda: [
            _tables().verification_table(found),
            _tables().replaced_choices(found),
            found.get("base"),
        ],
    )
    if not found["passed"]:
        raise typer.Exit(1)


@planned
def export(
    plan: Plan,
    to: Annotated[Path, typer.Option("--to", help="Folder to write into.")],
    json: Json = False,
) -> None:
    paths = [str(path) for path in verbs.export(plan, to)]
    emit(json, {"files": paths}, lambda: paths)
