"""The command `validate`: the planner against published measurements."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from workbench import verbs
from workbench.cli.options import Json, emit
from workbench.cli.output_files import write_whole
from workbench.cli.tables import table
from workbench.cli.terminal import Grid
from workbench.errors import refuse

if TYPE_CHECKING:
    from workbench.planner.validation import Validation

BY = ("framework", "gpu", "model", "table", "source", "profile", "file")
"""What errors can be split by."""
HEAD = ("rows", "mean", "median", "bias", "within 10 %", "worst")
REASONS_SHOWN = 30
PARTS_SHOWN = 25
"""Of a split, the largest; `--json` has all."""


def validate(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE.csv...", help="Measurements, a row a configuration."),
    ],
    by: Annotated[
        str | None, typer.Option("--by", help=f"Split errors by {', '.join(BY)}.")
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option("--profile", help="One framework profile for all rows, e.g. textbook."),
    ] = None,
    rows: Annotated[
        Path | None, typer.Option("--rows", help="Write every predicted row to this CSV.")
    ] = None,
    json: Json = False,
) -> None:
    if by is not None and by not in BY:
        raise refuse("--by", f"is '{by}'; legal: {', '.join(BY)}")
    from workbench.planner.validation.validation_report import errors_by_column

    found = verbs.validate(*files, profile=profile)
    data = found.summary()
    if by is not None:
        data["by"] = {by: errors_by_column(found.table, by)}
    if rows is not None:
        write_whole(rows, found.to_csv(), "--rows")
        data["rows_written"] = str(rows)
    written = f"rows: {rows}" if rows else None
    emit(json, data, lambda: [*_shown(found, data, by), written])


def _shown(found: Validation, data: dict[str, Any], by: str | None) -> list[Any]:
    parts = (
        (found.coverage, found.complete, "dense rows"),
        (found.moe_coverage, found.complete_moe, "rows of mixtures"),
    )
    said = [f"{share:.1%} of {count} {what}" for share, count, what in parts if share is not None]
    coverage = f"; {' and '.join(said)} of known model and batch" if said else ""
    head = (
        f"{found.rows} rows, {found.expressed} expressed as plans{coverage}; {len(found.table)} "
        f"predicted, "
        f"{data['suspect']} suspect, {found.seconds:.1f} s. Errors are estimated / measured - 1."
    )
    if found.table.empty:
        return [head, _reasons(data), _cautions(data)]
    shown: list[Any] = [
        head,
        _own_rows(data),
        _left_out(data),
        _sites(data, "By site", "sites", "small_sites"),
        _memory_sites(data),
        _sites(data, "Sites without a clean row, not counted above", "unclean_sites"),
        _reasons(data),
        _cautions(data),
        _errors(data),
        _standing(data),
    ]
    for name, parts in (
        ("framework profile", data["by_profile"]),
        (by, data.get("by", {}).get(by, {})),
    ):
        if name:
            shown.append(_parts(name, parts))
    return shown


def _own_rows(data: dict[str, Any]) -> str | None:
    """What predicts the rows that were not published."""
    own = data["own_rows"]
    if not own:
        return None
    half = own["median_half_width"]
    width = "" if half is None else f"; half-width of their 90 % intervals, median: {half:.1%}"
    return (
        f"Rows of your own: {own['rows']}, predicted with the published fit of "
        f"{own['fitted_constants']} constants, which has seen none of them{width}"
    )


def _left_out(data: dict[str, Any]) -> Grid | None:
    """Figures of step time on sites that no fitted constant has seen."""
    left = data["left_out"]
    if not left:
        return None
    groups, interval, one = left["groups"], left["interval"], left["after_one_row"]
    low, high = interval["inside_over_drawn_sites"]
    rows = [
        ("error, mean over sites", left["mean_over_sites"], left["in_sample_mean_over_sites"]),
        (
            "error, median over sites",
            left["median_over_sites"],
            left["in_sample_median_over_sites"],
        ),
        ("rank correlation within groups (Spearman)", groups.get("spearman"), None),
        ("regret of the best of three", groups.get("best_of_3_regret"), None),
        ("inside the predicted 90 %", interval["inside"], None),
        ("half-width of that interval, median", interval["median_half_width"], None),
        ("after one row of site and version, median", one.get("median_ape"), None),
    ]
    built = table(
        f"Step time on left-out sites: {left['rows']} clean rows, {left['fitted_constants']} "
        f"fitted constants; inside the interval {low:.0%} to {high:.0%} over drawn sites",
        ("what", "left out", "in sample"),
    )
    for what, *figures in rows:
        built.add_row(what, *("" if one is None else f"{one:.1%}" for one in figures))
    return built


def _sites(data: dict[str, Any], title: str, *parts: str) -> Grid | None:
    """Errors on left-out sites, a line a site."""
    found = [one for part in parts for one in data["left_out"].get(part, ())]
    if not found:
        return None
    built = table(
        title, ("site", "frameworks", "rows", "left out", "bias", "in sample", "Spearman")
    )
    for one in found:
        rank = one.get("ranking", {}).get("spearman")
        built.add_row(
            one["site"],
            ", ".join(one["frameworks"]),
            str(one["rows"]),
            f"{one['left_out']:.1%}",
            f"{one['left_out_bias']:+.1%}",
            f"{one['in_sample']:.1%}",
            "" if rank is None else f"{rank:.2f}",
        )
    return built


def _memory_sites(data: dict[str, Any]) -> Grid | None:
    """Errors of peak memory on sites that its fit has not seen."""
    from workbench.planner.validation.validation_report import error_cells

    left = data["memory_left_out"]
    if not left:
        return None
    held = left["interval"]
    built = table(
        f"Memory on left-out sites: {held['rows']} readings, {left['fitted_constants']} fitted "
        f"constants; {held['below_high']:.1%} below the 95 % quantile",
        ("site", "kind", *HEAD, "likely, in sample"),
        optional=("median", "worst"),
    )
    for one in left["sites"]:
        built.add_row(one["site"], one["kind"], *error_cells(one), f"{one['in_sample']:.1%}")
    return built


def _reasons(data: dict[str, Any]) -> Grid | None:
    if not data["reasons"] and not data["refused_by_planner"]:
        return None
    built = table("Not predicted", ("rows", "reason", "what would help"))
    for reason, count in list(data["reasons"].items())[:REASONS_SHOWN]:
        built.add_row(str(count), reason, data.get("remedies", {}).get(reason, ""))
    for field, count in data["refused_by_planner"].items():
        built.add_row(str(count), f"the planner does not model {field}", "another value of it")
    return built


def _cautions(data: dict[str, Any]) -> Grid | None:
    if not data["cautions"]:
        return None
    built = table("Predicted with caution", ("rows", "that", "what would help", "such as"))
    for one in data["cautions"]:
        built.add_row(str(one["rows"]), one["what"], one["help"], ", ".join(one["first"]))
    return built


def _errors(data: dict[str, Any]) -> Grid:
    from workbench.planner.validation.validation_report import error_cells

    built = table("Estimated against measured", ("what", *HEAD))
    for kind, errors in data["memory"].items():
        built.add_row(f"memory, {kind}", *error_cells(errors))
    time = data["time"]
    for name, errors in (
        ("consistent rows", time),
        ("clean rows", time["clean"]),
        ("all rows", time["all"]),
    ):
        built.add_row(f"time, {name}", *error_cells(errors))
    return built


def _standing(data: dict[str, Any]) -> Grid:
    built = table("Ranking and fit", ("what", "value", "over"))
    for what, value, over in _figures(data):
        if value is not None:
            built.add_row(what, value if isinstance(value, str) else f"{value:.1%}", over)
    return built


def _figures(data: dict[str, Any]) -> list[tuple[str, Any, str]]:
    time, groups, fit = data["time"], data["groups"], data["fit"]
    ran, short, failed = fit["ran"], fit["out_of_memory"], fit["failed"]
    over = f"{groups['groups']} groups, {groups['rows']} rows"
    one, out, failures = time["after_one_row"], time["leave_one_source_out"], data["failures"]
    area = failures["area"]
    rank = groups.get("spearman")
    return [
        (
            "time after one row of the same framework profile and table",
            one.get("mape"),
            f"{one['rows']} rows",
        ),
        ("time leaving one source out", out.get("mape"), f"{out['groups']} sources"),
        ("Spearman inside groups", None if rank is None else f"{rank:.3f}", over),
        ("regret of the first", groups.get("top_1_regret"), over),
        ("regret of the best of three", groups.get("best_of_3_regret"), over),
        ("ran, predicted to fit", ran["predicted_to_fit"], f"{ran['rows']} rows"),
        ("out of memory, predicted so", short["predicted_not_to_fit"], f"{short['rows']} rows"),
        ("failed, predicted not to fit", failed["predicted_not_to_fit"], f"{failed['rows']} rows"),
        (
            "failures ranked by needed memory (AUC)",
            None if area is None else f"{area:.3f}",
            f"{failures['rows']} rows",
        ),
        (
            "inside the predicted 90 % of time",
            time["interval"]["inside"],
            f"{time['interval']['rows']} rows",
        ),
    ]


def _parts(name: str, parts: dict[str, Any]) -> Grid:
    from workbench.planner.validation.validation_report import error_cells

    built = table(f"By {name}", (name, "of", *HEAD), optional=("median", "worst"))
    largest = sorted(parts.items(), key=lambda part: -part[1]["rows"])
    for part, errors in largest[:PARTS_SHOWN]:
        for what in ("memory", "time", "clean"):
            if errors[what].get("rows"):
                built.add_row(part, what, *error_cells(errors[what]))
    return built
