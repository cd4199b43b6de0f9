"""One microbatch through the stages of a rank: what it keeps, its largest live sets, its calls and
work.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby

from workbench.costmodel.inputs.operator_stages import StageParts
from workbench.costmodel.inputs.operator_strategies import OperatorStrategies
from workbench.costmodel.inputs.rank_workload import Workload
from workbench.costmodel.operators.allocation_tape import LiveSet
from workbench.costmodel.operators.symbolic_autograd import SymbolicTensor, leaf, run_backward
from workbench.costmodel.operators.symbolic_rank import GridCall, SymbolicRank, Work
from workbench.costmodel.operators.symbolic_sharding import as_shard
from workbench.costmodel.operators.symbolic_stage import Layers, SymbolicStage
from workbench.plan.operators.strategy_form import Placement

RUN_OF_A_KIND = 3
"""Layers alike in a row of which each runs: the first, one that stands for all between, and the
last.
"""
FORWARD_PHASES = {"head": "head_forward"}
"""Part of a stage -> the phase of its forward, where that is not the layers'."""
BACKWARD_PHASES = {"head": "final_norm", "embedding": "embedding", "input": "embedding"}
"""The same of its backward."""


@dataclass(frozen=True)
class StagePass:
    """A microbatch through one stage on one rank."""

    kept_of_layers: float
    """Bytes that stay between forward and backward, but for what the head has made."""
    kept_of_head: float
    """Bytes that the final norm and the head have made, but for logits."""
    kept_logits: float
    phases: dict[str, LiveSet]
    """Phase of `memory/live_sets.py` -> its largest live set."""
    calls: Counter[GridCall]
    work: Counter[tuple[str, Work]]


def stage_pass(w: Workload, named: OperatorStrategies, parts: StageParts) -> StagePass:
    """Run a microbatch through a stage.

    Its tokens and targets are counted elsewhere, and so are parameters and their gradients.
    """
    assert named.least is not None, "redistributions have no prices"
    r = SymbolicRank(w, named.sides, named.least)
    runs = tuple(_runs(named, parts.layers))
    stage = SymbolicStage(r, named, Layers(runs, parts.has_embedding, parts.has_head))
    batch, length = int(w.sequences), int(w.tokens / w.sequences)
    gradients: list[SymbolicTensor] = []
    r.enter("input")
    targets = x = r.empty((batch, length), 0)
    if not parts.has_embedding:
        x = r.empty((batch, length // named.ranks_over(named.boundary), w.shape.hidden))
        x = replace(x, node=leaf(gradients.append, "input"))
        x = as_shard(r, x, named.boundary_layout) if named.boundary else x
    y = stage.forward(x, targets)
    if not parts.has_head:
        # Backward starts from the graph's edge: the output is freed once it is sent.
        y = replace(y, storage=r.tape.allocate(0))
    r.tape.end_action("activations")
    phases = phases_of(r.tape.largest, FORWARD_PHASES, "forward")
    of_head, kept = r.tape.live_of("head"), r.tape.live
    r.tape.largest, r.action = {}, "B"
    gradient = replace(y, storage=r.tape.allocate(0), node=None)  # it is counted elsewhere
    roots = [(y, gradient)]
    del y, gradient
    run_backward(r.tape, roots)  # which the stage's input outlives
    del x
    r.tape.end_action("communication")
    return StagePass(
        kept["activations"] - of_head,
        of_head,
        kept.get("logits", 0.0),
        phases | phases_of(r.tape.largest, BACKWARD_PHASES, "feed_forward"),
        r.calls,
        r.work,
    )


def _runs(named: OperatorStrategies, numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Layers that run, and how many each stands for."""
    for _, group in groupby(numbers, partial(_strategies_of, named)):
        alike = list(group)
        if len(alike) <= RUN_OF_A_KIND:
            yield from ((layer, 1) for layer in alike)
        else:
            yield from ((alike[0], 1), (alike[1], len(alike) - 2), (alike[-1], 1))


def _strategies_of(named: OperatorStrategies, layer: int) -> list[tuple[str, Placement]]:
    block = f"blocks.{layer}."
    own = named.placements.items()
    return sorted(
        (path.removeprefix(block), placement) for path, placement in own if path.startswith(block)
    )


def _largest(sets: Iterable[LiveSet]) -> LiveSet:
    return max(sets, key=lambda live: sum(live.values()))


def phases_of(
    parts: dict[str, LiveSet], named: Mapping[str, str], layers: str
) -> dict[str, LiveSet]:
    """The largest live set of each phase that has any of these parts; `layers` is the layers'."""
    found: dict[str, list[LiveSet]] = {}
    for part, live in parts.items():
        found.setdefault(named.get(part, layers), []).append(live)
    return {phase: _largest(sets) for phase, sets in found.items()}
