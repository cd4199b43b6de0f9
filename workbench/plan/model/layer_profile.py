"""Layer profile: measured times and sizes of a model's layers (DAPPLE, 2007.01045)."""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from workbench.errors import refuse
from workbench.units import bytes_text, seconds_text
from workbench.untrusted_text import escaped, shown


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
    kept_bytes: float | None = None
    """Kept from forward to backward, its inputs among them; None: its output alone."""
    tied: tuple[tuple[str, float], ...] | None = None
    """Parameters that it shares with earlier layers, whose `parameter_bytes` count them: the last
    such layer's node, and bytes. None: not known.
    """
    backward_bytes: float | None = None
    """At the peak of its backward beside what it and the layers before keep; None: not known."""


class Tie(NamedTuple):
    """Parameters that layer `layer` shares with an earlier one, the last that has them."""

    earlier: int
    layer: int
    bytes: float


@dataclass(frozen=True)
class LayerProfile:
    """Layers in an order in which each stands after what it reads."""

    model: str
    profile_batch: int
    """Sequences (or images) of a measured pass."""
    layers: tuple[Layer, ...]
    sequence_length: int | None = None
    """Tokens of a sequence; None where the file does not say it, or it is of images."""
    precision: str | None = None
    """As `strategy.precision`; None where the file does not say it."""
    source: str = ""
    """On what it was measured, with which versions."""

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
    def kept(self) -> tuple[float, ...]:
        """Bytes that the first n layers keep for backward."""
        layers = self.layers
        return _sums(x.activation_bytes if x.kept_bytes is None else x.kept_bytes for x in layers)

    @cached_property
    def backward_peaks(self) -> tuple[float, ...]:
        """Bytes at the peak of each layer's backward that it needs or that it and the layers before
        keep.
        """
        return tuple(a + (x.backward_bytes or 0.0) for a, x in zip(self.kept[1:], self.layers))

    @cached_property
    def kept_input(self) -> tuple[float, ...]:
        """Bytes that a stage keeps besides, whose first layer is n: what crosses the cut."""
        known = [layer.kept_bytes is not None for layer in self.layers]
        return tuple(0.0 if own else cut for own, cut in zip([*known, True], self.crossing))

    @cached_property
    def ties(self) -> tuple[Tie, ...]:
        """Parameters of several layers: each but the first of these against the one before it."""
        place = {layer.node: i for i, layer in enumerate(self.layers)}
        return tuple(
            Tie(place[node], i, size)
            for i, layer in enumerate(self.layers)
            for node, size in layer.tied or ()
        )

    def tied_stages(self, starts: Sequence[int]) -> dict[tuple[int, int], float]:
        """Bytes of parameters of which two stages each hold a copy, whose gradients they exchange.

        Args:
            starts: The first layer of each stage.
        """
        found: dict[tuple[int, int], float] = {}
        for tie in self.ties:
            ends = (bisect_right(starts, tie.earlier) - 1, bisect_right(starts, tie.layer) - 1)
            if ends[0] != ends[1]:
                found[ends] = found.get(ends, 0.0) + tie.bytes
        return found

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

    def _repr_html_(self) -> str:
        head = ("layer", "forward", "backward", "output", "kept", "parameters")
        rows = [
            (
                layer.name,
                seconds_text(layer.forward_s),
                seconds_text(layer.backward_s),
                bytes_text(layer.activation_bytes),
                "–" if layer.kept_bytes is None else bytes_text(layer.kept_bytes),
                bytes_text(layer.parameter_bytes),
            )
            for layer in self.layers
        ]
        body = "".join(
            f"<tr>{''.join(f'<td>{escaped(cell)}</td>' for cell in row)}</tr>"
            for row in (head, *rows)
        )
        return f"<b>{escaped(self.model)}</b> {escaped(self.source)}<table>{body}</table>"


def _sums(figures: Iterable[float]) -> tuple[float, ...]:
    return (0.0, *accumulate(figures))


def in_reading_order(layers: Sequence[Layer], fields: Sequence[str]) -> tuple[Layer, ...]:
    """The given order, but for layers that read a later one: they wait for it.

    Raises `PlanError` where layers read each other, for one of them; `fields` are the layers' own.
    """
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
        at = _in_a_cycle(layers, place, waits)
        said = f"node {shown(layers[at].node)} reads what reads it"
        raise refuse(fields[at], f"{said}; legal: a graph without cycles")
    return tuple(layers[i] for i in order)


def _in_a_cycle(layers: Sequence[Layer], place: Mapping[str, int], waits: Sequence[int]) -> int:
    """A layer of a cycle, where some layers still wait: each of them reads another."""
    seen: set[int] = set()
    at = next(i for i, count in enumerate(waits) if count)
    while at not in seen:
        seen.add(at)
        at = next(place[node] for node in layers[at].inputs if waits[place[node]])
    return at
