"""The CSV file that holds layer profiles.

The columns are those of the profiles that DAPPLE's authors published (2007.01045): times in ms and
sizes in bytes of all of the profile batch, and the nodes that a layer reads. Ours say further what
a layer keeps for backward and needs in it, which parameters it shares, and what was measured; a
file may lack these columns or leave them empty.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from pathlib import Path

from workbench.errors import PlanError, Problem, refuse
from workbench.fields.bounds import LAYERS
from workbench.plan.model import layer_profile_cells as cells
from workbench.plan.model.layer_profile import Layer, LayerProfile, in_reading_order
from workbench.plan.model.layer_profile_cells import Row, Rows
from workbench.plan.schema import NARROW
from workbench.safe_io.files import read_some, replace_file, unread
from workbench.untrusted_text import shown

COLUMNS = (
    "model",
    "profile_batch",
    "index",
    "node",
    "layer",
    "forward_ms",
    "backward_ms",
    "activation_bytes",
    "parameter_bytes",
    "inputs",
)
FURTHER = ("kept_bytes", "backward_bytes", "sequence_length", "precision", "source")
TIED = "tied"
"""The column of parameters that a layer shares with earlier ones, as NODE:BYTES with spaces."""
FIGURES = ("forward_ms", "backward_ms", "activation_bytes", "parameter_bytes")
MOST_BYTES = 64 * 2**20
"""Of a file: a layer takes about a hundred bytes."""
MOST_HEAD = 10_000
"""Characters of the first line."""
PRECISIONS = ("fp32", "tf32", "bf16", "fp16", *NARROW)


def read_layer_profile(path: str | Path, model: str | None = None) -> LayerProfile:
    """The layer profile in the file `path`; `model` says which of several.

    Raises `PlanError` naming the row and the column where a figure is missing, negative or no
    number, or where an input is no layer of the model.
    """
    return parse_layer_profile(layer_profile_text(path), model, str(path))


def layer_profile_text(path: str | Path) -> str:
    """What the file `path` holds. Raises `PlanError`."""
    try:
        return read_some(path, MOST_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        raise refuse("model", f"'{path}' cannot be read: {unread(error)}") from None


def is_layer_profile(path: str | Path) -> bool:
    """Whether the file has the columns of one, whatever its rows hold."""
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            head = file.readline(MOST_HEAD)
    except (OSError, UnicodeDecodeError):
        return False
    return set(COLUMNS) <= set(head.strip().split(","))


def parse_layer_profile(text: str, model: str | None, path: str) -> LayerProfile:
    """The layer profile in `text`, of the file `path`; raises as `read_layer_profile`."""
    table = csv.DictReader(io.StringIO(text.removeprefix("\ufeff"), newline=""))
    try:
        rows = [(table.line_num, row) for row in table]
    except csv.Error as error:
        raise refuse("model", f"'{path}' is no table with commas: {error}") from None
    columns = list(table.fieldnames or ())
    missing = [name for name in COLUMNS if name not in columns]
    if missing:
        raise refuse("model", f"'{path}' lacks the columns {', '.join(missing)}")
    if twice := sorted({name for name in columns if columns.count(name) > 1}):
        raise refuse("model", f"'{path}' has more than one column {', '.join(twice)}; legal: one")
    try:
        _refuse_other_lengths(rows, len(columns))
        return _profile(_of_model(rows, model, path))
    except PlanError as error:
        raise PlanError([_in_file(problem, path) for problem in error.problems]) from None


def _in_file(problem: Problem, path: str) -> Problem:
    """The problem, its field with the file it is in."""
    if problem.field == "model":
        return problem
    return Problem(f"'{path}', {problem.field}", problem.message)


def _refuse_other_lengths(rows: Rows, columns: int) -> None:
    """Refuse rows with more or fewer cells than the head, whose cells may be another column's."""
    problems = []
    for line, row in rows:
        more = len(row.get(None) or ())  # type: ignore[call-overload]
        less = sum(cell is None for cell in row.values())
        if more or less:
            count = columns + more - less
            problems.append(
                Problem(f"row {line}", f"has {count} cells; legal: {columns}, one for each column")
            )
    if problems:
        raise PlanError(problems)


def _of_model(rows: Rows, model: str | None, path: str) -> Rows:
    if not rows:
        raise refuse("model", f"'{path}' holds no layers")
    if unnamed := [line for line, row in rows if not row["model"]]:
        raise PlanError(
            [Problem(f"row {line}, model", "is missing; legal: a name") for line in unnamed]
        )
    known = sorted({row["model"] or "" for _, row in rows})
    if model is None and len(known) > 1:
        raise refuse("model", f"'{path}' holds several models; name one of {', '.join(known)}")
    if model is not None and model not in known:
        raise refuse("model", f"'{path}' does not hold {shown(model)}; legal: {', '.join(known)}")
    chosen = [(line, row) for line, row in rows if model in (None, row["model"])]
    if len(chosen) > LAYERS.most:
        raise refuse("model", f"'{path}' holds {len(chosen)} layers; at most {LAYERS.most}")
    return chosen


def _profile(rows: Rows) -> LayerProfile:
    problems: list[Problem] = []
    layers = [_layer(line, row, problems) for line, row in rows]
    problems += _wrong_nodes(rows, layers)
    batch = cells.same_number(rows, "profile_batch", problems)
    known = any(row.get("sequence_length") for _, row in rows)
    length = cells.same_number(rows, "sequence_length", problems) if known else None
    precision = cells.same_word(rows, "precision", problems)
    source = cells.same_word(rows, "source", problems)
    if precision not in ("", *PRECISIONS):
        legal = ", ".join(PRECISIONS)
        where = f"row {rows[0][0]}, precision"
        problems.append(Problem(where, f"is {shown(precision)}; legal: {legal}"))
    if not problems and not any(layer.forward_s + layer.backward_s for layer in layers):
        problems.append(Problem("forward_ms", "is 0 on every row; legal: above 0 on one"))
    if problems:
        raise PlanError(problems)
    order = in_reading_order(layers, [f"row {line}, inputs" for line, _ in rows])
    if problems := list(_wrong_ties(rows, layers, order)):
        raise PlanError(problems)
    return LayerProfile(rows[0][1]["model"] or "", batch, order, length, precision or None, source)


def _layer(line: int, row: Row, problems: list[Problem]) -> Layer:
    cells.whole_number(line, row, "index", 0, problems)
    forward, backward, activation, parameter = (
        cells.figure(line, row, column, problems) for column in FIGURES
    )
    kept, beside = (
        cells.figure(line, row, column, problems) if row.get(column) else None
        for column in FURTHER[:2]
    )
    node, name = cells.names(line, row, problems)
    inputs, times = tuple((row["inputs"] or "").split()), (forward / 1e3, backward / 1e3)
    tied = cells.sizes_of_nodes(line, row, TIED, problems) if TIED in row else None
    return Layer(node, name, *times, activation, parameter, inputs, kept, tied, beside)


def _wrong_nodes(rows: Rows, layers: list[Layer]) -> Iterator[Problem]:
    """Nodes of several rows, and inputs that are no node."""
    places: dict[str, int] = {}
    for (line, _), layer in zip(rows, layers):
        if layer.node in places:
            said = f"{shown(layer.node)} is that of row {places[layer.node]} too"
            yield Problem(f"row {line}, node", f"{said}; legal: one for each row")
        places.setdefault(layer.node, line)
    for (line, _), layer in zip(rows, layers):
        for node in layer.inputs:
            if node not in places:
                yield Problem(f"row {line}, inputs", f"{shown(node)} is no node of this model")


def _wrong_ties(rows: Rows, layers: Sequence[Layer], order: Sequence[Layer]) -> Iterator[Problem]:
    """Parameters shared with a layer that is not earlier, or that has not as many."""
    place = {layer.node: i for i, layer in enumerate(order)}
    has = {x.node: x.parameter_bytes + sum(size for _, size in x.tied or ()) for x in layers}
    for (line, _), layer in zip(rows, layers):
        for node, size in layer.tied or ():
            where = f"row {line}, {TIED}"
            if place.get(node, len(order)) >= place[layer.node]:
                yield Problem(where, f"{shown(node)} is no earlier node; legal: one that is")
            elif size > has[node]:
                most = f"of which {shown(node)} has {has[node]:.12g}"
                yield Problem(where, f"shares {size:.12g} bytes, {most}; legal: at most so many")


def write_layer_profile(profile: LayerProfile, path: str | Path) -> None:
    """Write `profile` to the file `path`. Raises OSError."""
    ties = all(layer.tied is not None for layer in profile.layers)
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow((*COLUMNS, *FURTHER, *[TIED] * ties))
    known = (profile.sequence_length or "", profile.precision or "", profile.source)
    for index, layer in enumerate(profile.layers):
        times = (layer.forward_s * 1e3, layer.backward_s * 1e3)
        figures = map(_digits, (*times, layer.activation_bytes, layer.parameter_bytes))
        first = [profile.model, profile.profile_batch, index, layer.node, layer.name]
        shared = " ".join(f"{node}:{_digits(size)}" for node, size in layer.tied or ())
        sizes = map(_digits, (layer.kept_bytes, layer.backward_bytes))
        further = [*sizes, *known, *[shared] * ties]
        writer.writerow([*first, *figures, " ".join(layer.inputs), *further])
    replace_file(path, text.getvalue())


def _digits(figure: float | None) -> str:
    return "" if figure is None else f"{figure:.12g}"
