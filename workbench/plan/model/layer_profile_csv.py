"""The CSV file that holds layer profiles.

The columns are those of the profiles that DAPPLE's authors published (2007.01045): times in ms and
sizes in bytes of all of the profile batch, and the nodes that a layer reads. Ours say further what
a layer keeps for backward, and what was measured; a file may lack these columns or leave them
empty.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path

from workbench.errors import PlanError, Problem, refuse
from workbench.fields.bounds import LAYERS
from workbench.plan.model.layer_profile import Layer, LayerProfile, in_reading_order
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
FURTHER = ("kept_bytes", "sequence_length", "precision", "source")
FIGURES = ("forward_ms", "backward_ms", "activation_bytes", "parameter_bytes")
MOST_BYTES = 64 * 2**20
"""Of a file: a layer takes about a hundred bytes."""
Row = Mapping[str, str | None]
MOST = 1e18
"""Of a figure, so that sums stay finite."""
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


def parse_layer_profile(text: str, model: str | None, path: str) -> LayerProfile:
    """The layer profile in `text`, of the file `path`; raises as `read_layer_profile`."""
    table = csv.DictReader(io.StringIO(text.removeprefix("\ufeff"), newline=""))
    try:
        rows = list(enumerate(table, start=2))
    except csv.Error as error:
        raise refuse("model", f"'{path}' is no table with commas: {error}") from None
    missing = [name for name in COLUMNS if name not in (table.fieldnames or ())]
    if missing:
        raise refuse("model", f"'{path}' lacks the columns {', '.join(missing)}")
    return _profile(_of_model(rows, model, path))


def _of_model(
    rows: Sequence[tuple[int, Row]], model: str | None, path: str
) -> list[tuple[int, Row]]:
    names = sorted({row["model"] or "" for _, row in rows})
    if not rows:
        raise refuse("model", f"'{path}' holds no layers")
    if model is None and len(names) > 1:
        raise refuse("model", f"'{path}' holds several models; name one of {', '.join(names)}")
    if model is not None and model not in names:
        raise refuse("model", f"'{path}' does not hold {shown(model)}; legal: {', '.join(names)}")
    chosen = [(line, row) for line, row in rows if model in (None, row["model"])]
    if len(chosen) > LAYERS.most:
        raise refuse("model", f"'{path}' holds {len(chosen)} layers; at most {LAYERS.most}")
    return chosen


def _profile(rows: list[tuple[int, Row]]) -> LayerProfile:
    problems: list[Problem] = []
    layers = [_layer(line, row, problems) for line, row in rows]
    problems += _unknown_inputs(rows, layers)
    batch = _common(rows, "profile_batch", problems)
    length = _common(rows, "sequence_length", problems) if _known(rows, "sequence_length") else None
    words = {column: rows[0][1].get(column) or "" for column in ("precision", "source")}
    for column, word in words.items():
        problems += [
            Problem(f"row {line}, {column}", f"is {shown(row.get(column))}, above {shown(word)}")
            for line, row in rows
            if (row.get(column) or "") != word
        ]
    if words["precision"] not in ("", *PRECISIONS):
        legal = ", ".join(PRECISIONS)
        problems.append(Problem("precision", f"is {shown(words['precision'])}; legal: {legal}"))
    if not problems and not any(layer.forward_s + layer.backward_s for layer in layers):
        problems.append(Problem("forward_ms", "is 0 on every row; legal: above 0 on one"))
    if problems:
        raise PlanError(problems)
    name, precision = rows[0][1]["model"] or "", words["precision"] or None
    return LayerProfile(name, batch, in_reading_order(layers), length, precision, words["source"])


def _known(rows: list[tuple[int, Row]], column: str) -> bool:
    return any(row.get(column) for _, row in rows)


def _common(rows: list[tuple[int, Row]], column: str, problems: list[Problem]) -> int:
    """The whole number that a column has on every row; 1 with a problem where it has none."""
    before = len(problems)
    values = {_figure(line, row, column, problems) for line, row in rows}
    value = max(values)
    if len(problems) > before or (len(values) == 1 and value >= 1 and value == int(value)):
        return max(1, int(value))
    known = ", ".join(f"{one:g}" for one in sorted(values))
    problems.append(Problem(column, f"is {known}; legal: one whole number from 1 on every row"))
    return 1


def _layer(line: int, row: Row, problems: list[Problem]) -> Layer:
    forward, backward, activation, parameter = (
        _figure(line, row, column, problems) for column in FIGURES
    )
    kept = _figure(line, row, "kept_bytes", problems) if row.get("kept_bytes") else None
    if not row["node"]:
        problems.append(Problem(f"row {line}, node", "is missing; legal: a name"))
    inputs = tuple((row["inputs"] or "").split())
    node, name = row["node"] or "", row["layer"] or ""
    return Layer(node, name, forward / 1e3, backward / 1e3, activation, parameter, inputs, kept)


def _figure(line: int, row: Row, column: str, problems: list[Problem]) -> float:
    """The number in a cell; 0 with a problem where it is none, so that all are found at once."""
    where, text = f"row {line}, {column}", (row.get(column) or "").strip()
    try:
        value = float(text)
    except ValueError:
        said = f"is {shown(text)}" if text else "is missing"
        problems.append(Problem(where, f"{said}; legal: a number from 0"))
        return 0.0
    if not 0 <= value <= MOST:
        problems.append(Problem(where, f"is {shown(text)}; legal: a number from 0 to {MOST:g}"))
        return 0.0
    return value


def _unknown_inputs(rows: list[tuple[int, Row]], layers: list[Layer]) -> list[Problem]:
    known: set[str] = set()
    problems = []
    for (line, _), layer in zip(rows, layers):
        if layer.node in known:
            problems.append(Problem(f"row {line}, node", f"{shown(layer.node)} stands twice"))
        known.add(layer.node)
    for (line, _), layer in zip(rows, layers):
        for node in layer.inputs:
            if node not in known:
                problems.append(
                    Problem(f"row {line}, inputs", f"{shown(node)} is no node of this model")
                )
    return problems


def write_layer_profile(profile: LayerProfile, path: str | Path) -> None:
    """Write `profile` to the file `path`. Raises OSError."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow((*COLUMNS, *FURTHER))
    known = (profile.sequence_length or "", profile.precision or "", profile.source)
    for index, layer in enumerate(profile.layers):
        times = (layer.forward_s * 1e3, layer.backward_s * 1e3)
        figures = map(_digits, (*times, layer.activation_bytes, layer.parameter_bytes))
        first = [profile.model, profile.profile_batch, index, layer.node, layer.name]
        writer.writerow(
            [*first, *figures, " ".join(layer.inputs), _digits(layer.kept_bytes), *known]
        )
    replace_file(path, text.getvalue())


def _digits(figure: float | None) -> str:
    return "" if figure is None else f"{figure:.12g}"
