"""Live sets of plans with operator strategies, by the phases of `memory/live_sets.py`."""

from __future__ import annotations

import numpy as np

from workbench.costmodel.inputs.config import Array, named_table
from workbench.costmodel.inputs.operator_stages import stages_of
from workbench.costmodel.inputs.rank_workload import Workload
from workbench.costmodel.operators.allocation_tape import LiveSet
from workbench.costmodel.operators.stage_pass import StagePass
from workbench.costmodel.rank_passes import rank_passes

CATEGORIES = ("activations", "logits", "temporary", "communication")
FORWARD_PHASES = ("forward", "head_forward")
"""Phases of the forward."""
STEADY = 4
"""Microbatches for each pipeline rank after which a schedule repeats."""


def kept_in_flight(w: Workload) -> tuple[Array, Array]:
    """(activations, logits) of all microbatches between forward and backward, bytes by rank."""
    passes = rank_passes(w)
    layers, head, logits = (
        np.array([sum(getattr(stage, name) for stage in own) for own in passes])
        for name in ("kept_of_layers", "kept_of_head", "kept_logits")
    )
    losses = w.losses_in_flight
    return np.asarray(w.microbatches_in_flight * layers + losses * head), losses * logits


def kept_of_first_microbatch(w: Workload) -> dict[str, Array]:
    """What the first forward of a step leaves, bytes by rank."""
    first = [own[0] for own in rank_passes(w)]
    return {
        "activations": np.array([stage.kept_of_layers + stage.kept_of_head for stage in first]),
        "logits": np.array([stage.kept_logits for stage in first]),
    }


def phases_of_passes(w: Workload, between: Array) -> dict[str, dict[str, Array]]:
    """Phase -> category -> bytes by rank, of what a microbatch needs beside those in flight.

    Args:
        w: Per-rank problem sizes.
        between: Bytes of outputs and inputs on their way between stages, by rank.
    """
    activations, logits = kept_in_flight(w)
    others = {"activations": activations + between, "logits": logits}
    names = {name for own in rank_passes(w) for stage in own for name in stage.phases}
    return {name: _with_own(w, others, name) for name in sorted(names)}


def _with_own(w: Workload, others: dict[str, Array], phase: str) -> dict[str, Array]:
    """The live set of one phase: other microbatches, and the one that runs in place of what it
    keeps; of a rank's stages the one that needs most, nothing where none has the phase.
    """
    columns: dict[str, list[float]] = {category: [] for category in CATEGORIES}
    for at, own in enumerate(rank_passes(w)):
        beside = {name: float(np.broadcast_to(x, w.zeros.shape)[at]) for name, x in others.items()}
        more = _more_in_turn(w, at, own, "F" if phase in FORWARD_PHASES else "B")
        sets = [
            _replaced(beside | {"activations": beside["activations"] + extra}, stage, live)
            for stage, extra in zip(own, more)
            if (live := stage.phases.get(phase)) is not None
        ]
        largest = max(sets, key=lambda live: sum(live.values()), default={})
        for category, column in columns.items():
            column.append(largest.get(category, 0.0))
    return {category: np.array(column) for category, column in columns.items()}


def _more_in_turn(w: Workload, at: int, own: tuple[StagePass, ...], kind: str) -> list[float]:
    """For each of a rank's stages, how many bytes more are kept when it runs an action of `kind`
    than `kept_in_flight` says: where a rank has several stages that keep unlike much, the schedule
    says which microbatches of which stage are between forward and backward.
    """
    if len(own) == 1:
        return [0.0]
    counted = float(np.broadcast_to(sum(kept_in_flight(w)), w.zeros.shape)[at])
    most, rank = _shown_microbatches(w), w.places[at].stage
    kept = {stage: _kept(one) for stage, one in zip(stages_of(w.fixed, rank), own)}
    found, total = dict.fromkeys(kept, 0.0), 0.0
    for action in (w.fixed.table or named_table(w.fixed, most)).rows[rank]:
        total += kept[action.stage] * (action.kind == "F")
        if action.kind == kind:
            found[action.stage] = max(found[action.stage], total)
        total -= kept[action.stage] * (action.kind == "B")
    return [each - counted for each in found.values()]


def _shown_microbatches(w: Workload) -> int:
    """Microbatches of a step, as many as show all that a schedule keeps."""
    return min(int(np.max(w.microbatches)), STEADY * w.pipeline)


def _kept(stage: StagePass) -> float:
    return stage.kept_of_layers + stage.kept_of_head + stage.kept_logits


def _replaced(beside: LiveSet, stage: StagePass, live: LiveSet) -> LiveSet:
    kept = {"activations": stage.kept_of_layers + stage.kept_of_head, "logits": stage.kept_logits}
    return {
        name: beside.get(name, 0.0) - kept.get(name, 0.0) + live.get(name, 0.0)
        for name in CATEGORIES
    }
