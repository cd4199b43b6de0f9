"""Layer profile: measured times and sizes of a model's layers, and the CSV file that holds one.

The columns are those of the profiles that DAPPLE's authors published (2007.01045): times in ms and
sizes in bytes of the whole profile batch, and the nodes that a layer reads.
"""

from __future__ import annotations

import csv
import heapq
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path

from workbench.errors import PlanError, Problem, refuse
from workbench.fields.bounds import LAYERS
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
FIGURES = ("forward_ms", "backward_ms", "activation_bytes", "parameter_bytes")
MOST_BYTES = 64 * 2**20
"""Of a file: a layer takes about a hundred bytes."""
Row = Mapping[str, str | None]


@dataclass(frozen=True)
class Layer:
    """One layer, all of it for the whole profile batch."""

    node: str
    """What other layers call it in their inputs."""
    name: str
    forward_s: float
    backward_s: float
    activation_bytes: float
    """Of its output."""
    parameter_bytes: float
    inputs: tuple[str, ...] = ()
    """Nodes whose outputs it reads."""


@dataclass(frozen=True)
class LayerProfile:
    """Layers in an order in which each stands after what it reads."""

    model: str
    profile_batch: int
    """Sequences (or images) of a measured pass."""
    layers: tuple[Layer, ...]

    @cached_property
    def forward(self) -> tuple[float, ...]:
        """Seconds of forward of the first n layers, n from 0."""
        return _sums(layer.forward_s for layer in self.layers)

    @cached_property
    def backward(self) -> tuple[float, ...]:
        """Seconds of backward of the first n layers."""
        return _sums(layer.backward_s for layer in self.layers)

    @cached_property
    def parameters(self) -> tuple[float, ...]:
        """Bytes of parameters of the first n layers."""
        return _sums(layer.parameter_bytes for layer in self.layers)

    @cached_property
    def activations(self) -> tuple[float, ...]:
        """Bytes that the first n layers put out."""
        return _sums(layer.activation_bytes for layer in self.layers)

    @cached_property
    def crossing(self) -> tuple[float, ...]:
        """Bytes that cross a cut before layer n: outputs of earlier layers that later ones read,
        each once.
        """
        place = {layer.node: i for i, layer in enumerate(self.layers)}
        last = {place[node]: i for i, layer in enumerate(self.layers) for node in layer.inputs}
        change = [0.0] * (len(self.layers) + 1)
        for i, reader in last.items():
            change[i + 1] += self.layers[i].activation_bytes
            change[reader + 1] -= self.layers[i].activation_bytes
        return tuple(accumulate(change))


def _sums(figures: Iterable[float]) -> tuple[float, ...]:
    return (0.0, *accumulate(figures))


def read_layer_profile(path: str | Path, model: str | None = None) -> LayerProfile:
    """The layer profile in the file `path`; `model` says which of several.

    Raises `PlanError` naming the row and the column where a figure is missing, negative or no
    number, or where an input is no layer of the model.
    """
    try:
        text = read_some(path, MOST_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        raise refuse("model", f"'{path}' cannot be read: {unread(error)}") from None
    table = csv.DictReader(io.StringIO(text.removeprefix("\ufeff"), newline=""))
    try:
        rows = list(enumerate(table, start=2))
    except csv.Error as error:
        raise refuse("model", f"'{path}' is no table with commas: {error}") from None
    missing = [name for name in COLUMNS if name not in (table.fieldnames or ())]
    if missing:
        raise refuse("model", f"'{path}' lacks the columns {', '.join(missing)}")
    return _profile(_of_model(rows, model, str(path)))


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
    batches = {_figure(line, row, "profile_batch", problems) for line, row in rows}
    problems += _unknown_inputs(rows, layers)
    batch = max(batches)
    if not problems and (len(batches) > 1 or batch < 1 or batch != int(batch)):
        known = ", ".join(f"{one:g}" for one in sorted(batches))
        problems.append(
            Problem("profile_batch", f"is {known}; legal: one whole number from 1 on every row")
        )
    if problems:
        raise PlanError(problems)
    return LayerProfile(rows[0][1]["model"] or "", int(batch), _in_order(layers))


def _layer(line: int, row: Row, problems: list[Problem]) -> Layer:
    forward, backward, activation, parameter = (
        _figure(line, row, column, problems) for column in FIGURES
    )
    if not row["node"]:
        problems.append(Problem(f"row {line}, node", "is missing; legal: a name"))
    inputs = tuple((row["inputs"] or "").split())
    node, name = row["node"] or "", row["layer"] or ""
    return Layer(node, name, forward / 1e3, backward / 1e3, activation, parameter, inputs)


def _figure(line: int, row: Row, column: str, problems: list[Problem]) -> float:
    """The number in a cell; 0 with a problem where it is none, so that all are found at once."""
    where, text = f"row {line}, {column}", (row[column] or "").strip()
    try:
        value = float(text)
    except ValueError:
        said = f"is {shown(text)}" if text else "is missing"
        problems.append(Problem(where, f"{said}; legal: a number from 0"))
        return 0.0
    if not math.isfinite(value) or value < 0:
        problems.append(Problem(where, f"is {text}; legal: a number from 0"))
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


def _in_order(layers: list[Layer]) -> tuple[Layer, ...]:
    """The file's order, but for layers that read a later row: they wait for it."""
    place = {layer.node: i for i, layer in enumerate(layers)}
    waits = [len(set(layer.inputs)) for layer in layers]
    readers: list[list[int]] = [[] for _ in layers]
    for i, layer in enumerate(layers):
        for node in set(layer.inputs):
            readers[place[node]].append(i)
    ready, order = [i for i, count in enumerate(waits) if not count], []
    while ready:
        order.append(heapq.heappop(ready))
        for reader in readers[order[-1]]:
            waits[reader] -= 1
            if not waits[reader]:
                heapq.heappush(ready, reader)
    if len(order) < len(layers):
        stuck = next(layer.node for i, layer in enumerate(layers) if waits[i])
        raise refuse(
            "inputs", f"{shown(stuck)} reads what reads it; legal: a graph without circles"
        )
    return tuple(layers[i] for i in order)


def write_layer_profile(profile: LayerProfile, path: str | Path) -> None:
    """Write `profile` to the file `path`. Raises OSError."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for index, layer in enumerate(profile.layers):
        times = (layer.forward_s * 1e3, layer.backward_s * 1e3)
        sizes = (layer.activation_bytes, layer.parameter_bytes)
        figures = [f"{number:.12g}" for number in (*times, *sizes)]
        first = [profile.model, profile.profile_batch, index, layer.node, layer.name]
        writer.writerow([*first, *figures, " ".join(layer.inputs)])
    replace_file(path, text.getvalue())
