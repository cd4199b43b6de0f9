"""Generators of compute-only tables."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from workbench.schedules.action import Action
from workbench.schedules.table import Row, Table


def generate(name: str, ranks: int, microbatches: int, chunks: int = 1) -> Table:
    """The compute-only table of the schedule `name` on `ranks` pipeline ranks.

    Fewer microbatches than ranks are legal: the pipeline then never fills. Raises ValueError where the name is
    unknown, a number is below one, or the schedule has no chunks.
    """
    if name not in GENERATORS:
        raise ValueError(f"schedule {name!r} does not exist; there are: {', '.join(sorted(GENERATORS))}")
    for what, value in (("ranks", ranks), ("microbatches", microbatches), ("chunks", chunks)):
        if value < 1:
            raise ValueError(f"{what} = {value}; at least 1")
    if chunks != 1:
        raise ValueError(f"schedule {name!r} holds one chunk a rank, chunks = {chunks}; set chunks to 1")
    return _table(name, ranks, microbatches)


@lru_cache(maxsize=64)
def _table(name: str, ranks: int, microbatches: int) -> Table:
    rows = tuple(GENERATORS[name](rank, ranks, microbatches) for rank in range(ranks))
    return Table(rows, stages=ranks, microbatches=microbatches, placement=tuple(range(ranks)))


def names() -> tuple[str, ...]:
    """Schedules that `generate` knows."""
    return tuple(sorted(GENERATORS))


def gpipe(rank: int, ranks: int, microbatches: int) -> Row:
    """All forwards, then all backwards (Huang et al. 2019, arXiv 1811.06965): `microbatches` in flight."""
    forwards = [Action(rank, "F", m) for m in range(microbatches)]
    return tuple(forwards + [Action(rank, "B", m) for m in range(microbatches)])


def one_forward_one_backward(rank: int, ranks: int, microbatches: int) -> Row:
    """DAPPLE's early backward (PPoPP'21), also PipeDream-flush (2104.04473): at most `ranks - rank` in flight."""
    warm_up = min(microbatches, ranks - 1 - rank)
    row = [Action(rank, "F", m) for m in range(warm_up)]
    for m in range(microbatches):
        if m + warm_up < microbatches:
            row.append(Action(rank, "F", m + warm_up))
        row.append(Action(rank, "B", m))
    return tuple(row)


GENERATORS: dict[str, Callable[[int, int, int], Row]] = {"gpipe": gpipe, "1f1b": one_forward_one_backward}
