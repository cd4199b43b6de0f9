"""A rank that is slow, not stopped, is named by its own time, and nobody who has more work."""

import itertools
import random
from collections.abc import Callable

import pytest

from workbench.runs.diagnose.straggler import StragglerWatch

Own = Callable[[int, int], dict[str, float]]
"""Own seconds by phase, of a rank and a step."""
PHASES = {"data loading": 0.001, "forward": 0.1, "backward": 0.2, "optimizer": 0.05}
STAGES: dict[str, list[int]] = {
    "data 2": [0, 0],
    "data 4": [0] * 4,
    "pipeline 2": [0, 1],
    "pipeline 4": [0, 1, 2, 3],
    "pipeline 2 x data 2": [0, 0, 1, 1],
    "many": [n % 4 for n in range(128)],
}


def say(stages: list[int], own: Own, steps: int = 20, device: str = "cpu") -> list[str]:
    """Words of the watch after each step."""
    watch, said = StragglerWatch(), []
    for rank, stage in enumerate(stages):
        watch.take({"kind": "hello", "rank": rank, "stage": stage, "device": device})
    for step in range(steps):
        each = [own(rank, step) for rank in range(len(stages))]
        longest = max(sum(one.values()) for one in each)
        for rank, mine in enumerate(each):
            rows = [{"action": "F", "start": 0.0, "end": mine["forward"]}]
            rows += [{"action": "WAIT_RECV", "start": mine["forward"], "end": longest}]
            record = {"rank": rank, "step": step}
            on_cpu = mine if device == "cpu" else None
            watch.take({"kind": "step", "seconds": longest, "own_seconds": on_cpu, **record})
            watch.take({"kind": "timeline", "rows": rows, **record})
        said.append(watch.words())
    return said


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("name", STAGES)
def test_a_slow_rank_is_named_with_its_phase(name: str, phase: str) -> None:
    stages = STAGES[name]
    slow = len(stages) - 1

    def own(rank: int, step: int) -> dict[str, float]:
        return {**PHASES, phase: PHASES[phase] + 2.0 * (rank == slow)}

    said = say(stages, own)
    assert said[-1].startswith(f"rank {slow} is slow: 2.35 s of its own a step, 6.7 times")
    assert f"most of it in {phase} " in said[-1]
    assert said[5] == "" and len({*said[7:]}) == 1, "after a few steps, and in the same words"


def test_a_rank_of_its_own_stage_that_becomes_slow_is_held_against_how_it_was() -> None:
    def own(rank: int, step: int) -> dict[str, float]:
        return {"forward": (0.3, 0.1)[rank] * (3.0 if rank == 1 and step > 15 else 1.0) ** 2}

    assert say([0, 1], own, 15)[-1] == ""
    assert say([0, 1], own, 40)[-1].startswith("rank 1 is slow: 900 ms")


def test_gpus_are_judged_by_the_spans_of_their_timed_steps() -> None:
    said = say([0] * 4, lambda rank, _: {"forward": 0.1 + 0.3 * (rank == 2)}, device="cuda:0")
    assert said[1] == "" and said[-1].startswith("rank 2 is slow: 400 ms")


UNEVEN: dict[str, Own] = {
    "equal": lambda rank, step: PHASES,
    "one slow step in three": lambda rank, step: {"forward": 2.0 if step % 3 == rank else 0.1},
    "stages of unequal work": lambda rank, step: {"forward": (0.1, 0.25, 0.1, 0.28)[rank]},
    "warming up": lambda rank, step: {"forward": 5.0 if step < 2 and rank == 1 else 0.1},
    "steps too short to matter": lambda rank, step: {"forward": 0.001 * (1 + 3 * (rank == 1))},
    "noise": lambda rank, step: {
        "forward": random.Random(1000 * rank + step).lognormvariate(-3, 0.7)
    },
}


@pytest.mark.parametrize("name", UNEVEN)
def test_nobody_is_named_where_all_have_their_work(name: str) -> None:
    assert set(say([0, 1, 2, 3], UNEVEN[name], 200)) == {""}


@pytest.mark.parametrize("name", ["equal", "one slow step in three", "warming up", "noise"])
def test_nor_among_replicas(name: str) -> None:
    assert set(say([0, 0, 0, 0], UNEVEN[name], 200)) == {""}


def test_who_is_no_longer_slow_is_named_no_more_and_not_by_turns() -> None:
    def own(rank: int, step: int) -> dict[str, float]:
        hovering = 2.1 if step % 20 < 10 else 1.8
        return {"forward": 0.1 * (1 if rank or step < 10 else hovering if step < 90 else 1)}

    said = say([0, 0, 0], own, 120)
    assert [bool(words) for words, _ in itertools.groupby(said)] == [False, True, False]
