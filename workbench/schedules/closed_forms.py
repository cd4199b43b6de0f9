"""Closed forms by name of a schedule: the bubble and the activations in flight, without a table.
Also steps of which only the first microbatches are simulated.
"""

from __future__ import annotations

from collections.abc import Callable

from workbench.schedules.generators import SCHEDULES
from workbench.schedules.named.pipeline_schedule import Number, PipelineSchedule


def bubble(
    name: str,
    ranks: Number,
    microbatches: Number,
    chunks: Number,
    forward: Number,
    input: Number,
    weight: Number,
) -> Number:
    """Seconds from the step's common start to its common end, less the work of one rank.

    `forward`, `input` and `weight` are the seconds F, I and W that one microbatch takes on a whole
    rank, all its chunks together. Exact: equals `simulate(generate(...)).bubble` for any F, I, W >
    0 and all numbers that `generate` takes, which are not checked here. Unequal stages, and
    transfers that take time, need the simulator.

    With n = ranks - 1 and a pipeline that fills:
    - gpipe, 1f1b, eager-1f1b: n (F + I + W); interleaved: that / chunks (2104.04473). All exact in
      the papers.
    - zb-h1: n (F + I - min(F, I, W)); 2401.10241 has n (F + I - W), exact where W is the least of
      the three.
    - zb-h2: n max(F, F + I - 2W, I - F); the paper's n (F + I - 2W) is a rank's own span, with a
      synchronous optimizer n F is the least.
    - zb-v: n F / 2 and dualpipe-v: n F / 2 at F = I = W (2405.15362, DeepSeek); elsewhere the paths
      in their files.

    Raises ValueError where the schedule has no closed form.
    """
    return _named(name).bubble(ranks, microbatches, chunks, forward, input, weight)


def in_flight(
    name: str, rank: Number, ranks: Number, microbatches: Number, chunks: Number
) -> Number:
    """Most chunks whose activations `rank` holds at once; a chunk is 1/`chunks` of the rank's
    layers.

    Exact: equals `in_flight(generate(...))[rank]`. Raises ValueError where the schedule has no
    closed form.
    """
    return _named(name).in_flight(rank, ranks, microbatches, chunks)


def _named(name: str) -> PipelineSchedule:
    if name not in SCHEDULES:
        raise ValueError(
            f"schedule {name!r} has no closed form; there are: {', '.join(sorted(SCHEDULES))}"
        )
    return SCHEDULES[name]


def long_makespan(
    makespan: Callable[[int], float], microbatches: int, most: int, held: int, turn: int = 1
) -> float:
    """Seconds of all microbatches: of as many as are simulated, and of the others at the pace of
    the last quarter of those.

    Args:
        makespan: Seconds of so many microbatches, simulated.
        microbatches: Of the step.
        most: That are simulated, as far as they show the pace.
        held: In flight at most; until so many have come, the pace is another.
        turn: Microbatches after which what ranks do repeats; both are multiples of it where turns
            are shorter than what is simulated.
    """
    few = min(microbatches, max(most, 4 * held))
    if few == microbatches:
        return makespan(few)
    turn = turn if 2 * turn < few else 1
    few += (microbatches - few) % turn
    more = max(turn, few // 4 // turn * turn)
    some = makespan(few)
    return some + (microbatches - few) * (some - makespan(few - more)) / more
