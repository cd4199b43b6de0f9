"""Live sets of ranks that have several stages, of split backward, of custom schedules and of
replicas in turn: each stage's phases, beside what its rank holds of all its stages, counted action
by action.

The stages of a rank may differ in layers and ends, and a V-shaped schedule holds more of the one
than of the other, so that no closed form of the rank alone is exact.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce

import numpy as np

from workbench.costmodel.inputs.config import Array
from workbench.costmodel.inputs.held_counts import (
    COMPUTE,
    HeldCounts,
    counted_microbatches,
    counts_transfers,
    held_counts,
)
from workbench.costmodel.inputs.operator_stages import rank_stages
from workbench.costmodel.inputs.rank_workload import Workload
from workbench.costmodel.memory.activation_memory import last_layer_activations
from workbench.costmodel.memory.live_sets.activations_in_flight import (
    ActivationsInFlight,
    between_stages,
    stage_activations,
)
from workbench.costmodel.memory.live_sets.stage_phases import (
    MemoryByCategory,
    add_categories,
    backward_phases,
    forward_phases,
    total_bytes,
    weight_gradient_phase,
)
from workbench.costmodel.memory.loss_memory import HeadMemory, head_memory


def counts_by_action(w: Workload) -> bool:
    """Whether what a rank holds is counted action by action: it has several stages, its backward is
    split, its schedule is custom, or it takes microbatches in turn with other replicas.
    """
    s = w.fixed
    is_counted = s.chunks > 1 or s.table is not None or s.splits_backward or s.in_turn
    return s.pipeline > 1 and is_counted


def several_stages_live_sets(w: Workload, by_category: bool) -> dict[str, MemoryByCategory]:
    """Phase -> category -> bytes by pipeline rank, as `live_by_phase`."""
    stages, rows = _stages_of_ranks(w)
    head = head_memory(stages)
    held = _HeldBytes.of(w, stages, rows, head)
    found = []
    for kind, (flight, on_their_way) in held.flights(by_category).items():
        phases = _phases(stages, head, kind, flight)
        found.append({x: add_categories(live, on_their_way) for x, live in phases.items()})
    names = dict.fromkeys(name for phases in found for name in phases)
    lives = {name: [phases[name] for phases in found if name in phases] for name in names}
    first = {"first_forward": held.of_a_forward()}
    largest = _largest_of_ranks if by_category else _most_of_ranks
    return first | {name: largest(each, rows) for name, each in lives.items()}


def _phases(
    stages: Workload, head: HeadMemory, kind: str, flight: ActivationsInFlight
) -> dict[str, MemoryByCategory]:
    """Phases of an action."""
    is_split = kind == "I"
    if kind == "W":
        return {"weights": weight_gradient_phase(stages, flight.total, flight.logits)}
    layer = last_layer_activations(stages, is_split)
    if kind == "F":
        return forward_phases(stages, head, layer, flight)
    return backward_phases(stages, head, layer, flight, is_split)


def _stages_of_ranks(w: Workload) -> tuple[Workload, list[list[int]]]:
    """(`w` with an entry for each stage of its ranks, one rank after the other; the entries of each
    rank).
    """
    parts = [rank_stages(w.fixed, place.stage) for place in w.places]
    every = [stage for own in parts for stage in own]
    of_rank = np.repeat(np.arange(len(parts)), list(map(len, parts)))
    by_stage = (len(every), *w.layers.shape[1:])
    first_moe = w.shape.moe.first_dense if w.shape.moe else w.shape.layers

    def column(values: Sequence[float]) -> Array:
        return np.array(values, dtype=float).reshape(by_stage)

    stages = replace(
        w,
        fixed=replace(w.fixed, chunks=1),
        places=tuple(w.places[rank] for rank in of_rank),
        alike=tuple(w.alike[rank] for rank in of_rank),
        layers=column([len(x.layers) for x in every]),
        dense_layers=column([sum(i < first_moe for i in x.layers) for x in every]),
        has_embedding=column([x.has_embedding for x in every]),
        has_head=column([x.has_head for x in every]),
        recomputed_layers=w.searched.recomputed_layers,
        in_buckets=w.in_buckets and w.in_buckets.of(of_rank),
        rank_multiplicity=_of_rank(w.rank_multiplicity, of_rank),
        layer_indices=tuple(tuple(x.layers) for x in every) if w.layer_indices else (),
        num_boundary_transfers=_of_rank(w.num_boundary_transfers, of_rank),
        microbatches_in_flight=_of_rank(w.microbatches_in_flight, of_rank),
        inputs_ahead=np.ones_like(column([0] * len(every))),
    )
    ends = np.cumsum(list(map(len, parts)))
    return stages, [list(range(end - len(own), end)) for own, end in zip(parts, ends)]


def _of_rank(values: Array, rank: Array) -> Array:
    return values[rank] if len(values) > 1 else values


@dataclass(frozen=True, eq=False)
class _HeldBytes:
    """What each microbatch that a rank holds is, by entry of its stages."""

    rows: list[list[int]]
    """Entries of each rank's stages."""
    saved: Array
    """Activations until backward."""
    logits: Array
    """Tensors of vocabulary width until backward."""
    layers: Array
    """What the layers save of them."""
    deferred: Array
    """What they leave for a weight gradient."""
    passed: Array
    """What passes between two stages."""
    uncounted: Array
    """What is on its way between stages where that is not counted, by rank."""
    microbatches: Array
    """Of each candidate, as many as show what is held at once."""
    counts: dict[int, list[HeldCounts]]
    """Microbatches -> by rank."""

    @classmethod
    def of(
        cls, ranks: Workload, stages: Workload, rows: list[list[int]], head: HeadMemory
    ) -> _HeldBytes:
        """Of a schedule's candidates.

        Args:
            ranks: By rank.
            stages: By stage of each rank.
            rows: Entries in `stages` of each rank.
            head: Of `stages`.
        """
        own, s = stage_activations(stages), ranks.fixed
        saved = own.layers + own.beside + own.losses * head.saved
        saved, logits, layers, deferred = np.broadcast_arrays(
            saved, own.losses * head.logits, own.layers, own.deferred
        )
        candidates = saved.shape[1:]
        passed = np.broadcast_to(np.asarray(stages.residual_bytes, dtype=float), saved.shape)
        uncounted = between_stages(ranks) * (not counts_transfers(s))
        uncounted = np.broadcast_to(uncounted, (len(rows), *candidates))
        microbatches = np.broadcast_to(_counted(ranks), candidates)
        counts = {
            int(number): [held_counts(s, int(number), alike) for alike in ranks.alike]
            for number in np.unique(microbatches)
        }
        return cls(rows, saved, logits, layers, deferred, passed, uncounted, microbatches, counts)

    def flights(self, by_category: bool) -> dict[str, tuple[ActivationsInFlight, MemoryByCategory]]:
        """Kind of action -> (the most that is held when each of the stages acts, gradients on their
        way then); else than `by_category`, their sum, as activations.
        """
        shape = self.saved.shape
        most = np.zeros((3 if by_category else 1, len(COMPUTE), len(self.saved), self.candidates))
        kinds = set[str]()
        numbers = self.microbatches.ravel()
        places = {number: np.flatnonzero(numbers == number) for number in self.counts}
        for at, (rows, uncounted) in enumerate(zip(self.rows, self.uncounted)):
            size = self._bytes(rows)
            size = size if by_category else size.sum(axis=0, keepdims=True)
            for number, columns in places.items():
                counts = self.counts[number][at]
                acts, entries = zip(*((COMPUTE.index(x), rows[place]) for place, x in counts))
                kinds |= {kind for _, kind in counts}
                found = _largest(counts, size[:, :, columns])
                found[0] += uncounted.ravel()[columns]
                most[:, np.array(acts)[:, None], np.array(entries)[:, None], columns] = found
        none = np.zeros(())
        flights = {}
        for kind in [x for x in COMPUTE if x in kinds]:
            of_kind = most[:, COMPUTE.index(kind)].reshape(-1, *shape)
            total, logits, passed = of_kind if by_category else (of_kind[0], none, none)
            flight = ActivationsInFlight(total, logits, self.layers, self.deferred)
            flights[kind] = flight, {"communication": passed} if by_category else {}
        return flights

    @property
    def candidates(self) -> int:
        """Number of them."""
        return self.microbatches.size

    def _bytes(self, rows: list[int]) -> Array:
        """Bytes of each count of a rank: (activations, logits, gradients on their way)."""
        stages = len(rows)
        size = np.zeros((3, 2 * stages + 2, self.candidates))
        size[0, :stages], size[0, stages:-2] = (
            self._flat(self.saved, rows),
            self._flat(self.deferred, rows),
        )
        size[1, :stages] = self._flat(self.logits, rows)
        # A rank of stages with replicas of their own has one stage.
        size[0, -2] = size[2, -1] = self._flat(self.passed, rows[:1])
        return size

    def _flat(self, values: Array, rows: list[int]) -> Array:
        return values[rows].reshape(len(rows), -1)

    def of_a_forward(self) -> MemoryByCategory:
        """What the first forward of each rank leaves, its output among it."""
        first = [own[0] for own in self.rows]
        return {"activations": self.saved[first] + self.passed[first], "logits": self.logits[first]}


def _largest(counts: HeldCounts, size: Array) -> Array:
    """Largest of `size` (categories, counts, candidates) at each action of `counts`:
    (categories, actions, candidates).
    """
    held, starts = counts.stacked
    total, ends = held @ size.sum(axis=0), (*starts[1:], len(held))
    if len(size) == 1:
        return _most_of_groups(total, zip(starts, ends))[None]
    most = np.array(
        [start + np.argmax(total[start:end], axis=0) for start, end in zip(starts, ends)]
    )
    return np.asarray(np.einsum("anh,chn->can", held[most], size))


def _counted(w: Workload) -> Array:
    """Microbatches of a step of each candidate, as many as show what is held at once."""
    every = w.fixed.global_batch / w.searched.micro_batch if w.fixed.in_turn else w.microbatches
    enough: Array = np.vectorize(partial(counted_microbatches, w.fixed), otypes=[int])(every)
    return enough


def _largest_of_ranks(lives: list[MemoryByCategory], rows: list[list[int]]) -> MemoryByCategory:
    """The largest of each rank's stages, in any of `lives`."""
    names = sorted({name for live in lives for name in live})
    shape = np.broadcast_shapes(*(np.shape(x) for live in lives for x in live.values()))
    none = np.zeros(shape)
    every = {
        name: np.concatenate([np.broadcast_to(live.get(name, none), shape) for live in lives])
        for name in names
    }
    total = total_bytes(every)
    found: dict[str, list[Array]] = {name: [] for name in names}
    for own in rows:
        entries = [start + row for start in range(0, len(total), shape[0]) for row in own]
        most = np.argmax(total[entries], axis=0)[None]
        for name, x in every.items():
            found[name].append(np.take_along_axis(x[entries], most, axis=0)[0])
    return {name: np.stack(each) for name, each in found.items()}


def _most_of_ranks(lives: list[MemoryByCategory], rows: list[list[int]]) -> MemoryByCategory:
    """Largest of each rank's stages as the sum of all categories alone."""
    most = reduce(np.maximum, map(total_bytes, lives))
    return {"activations": _most_of_groups(most, ((own[0], own[-1] + 1) for own in rows))}


def _most_of_groups(values: Array, groups: Iterable[tuple[int, int]]) -> Array:
    """Maximum of `values` over each group of rows (first, one past the last); several times as fast
    as `np.maximum.reduceat` along an axis that is not the last.
    """
    return np.stack([values[first:end].max(axis=0) for first, end in groups])
