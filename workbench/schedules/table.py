"""A schedule as a table of actions, one row a pipeline rank, and its CSV form."""

from __future__ import annotations

import csv
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from workbench.schedules.action import Action, parse_cell

Row = tuple[Action, ...]


@dataclass(frozen=True)
class Table:
    """What every rank of a pipeline does, in order."""

    rows: tuple[Row, ...]
    """Actions by pipeline rank, in the order in which the rank takes them."""
    stages: int
    microbatches: int
    placement: tuple[int, ...]
    """Stage -> the pipeline rank that holds it; the first of its `replicas`."""
    replicas: tuple[int, ...] = ()
    """Consecutive pipeline ranks that hold each stage and take its microbatches in turn; empty: one
    each.
    """

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Hash of every action, taken once: caches ask for it at each look."""
        return hash((self.rows, self.placement, self.replicas))

    @property
    def ranks(self) -> int:
        """Pipeline ranks."""
        return len(self.rows)

    @cached_property
    def lowered(self) -> bool:
        """Whether sends and receives stand in the table; asked for every action, so looked up
        once.
        """
        return any(action.is_p2p for row in self.rows for action in row)

    @cached_property
    def split(self) -> bool:
        """Whether any backward is split into I and W."""
        return any(action.kind == "W" for row in self.rows for action in row)

    def homes(self, stage: int) -> range:
        """The pipeline ranks that hold a stage."""
        first = self.placement[stage]
        return range(first, first + (self.replicas[stage] if self.replicas else 1))

    def home(self, stage: int, microbatch: int | None) -> int:
        """The pipeline rank that runs a microbatch of a stage."""
        first = self.placement[stage]
        return first + (microbatch or 0) % self.replicas[stage] if self.replicas else first

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Stages that `rank` holds, ascending."""
        return tuple(stage for stage in range(self.stages) if rank in self.homes(stage))

    @cached_property
    def places(self) -> tuple[int, ...]:
        """Place of each stage among those of its rank."""
        seen: Counter[int] = Counter()
        found = []
        for home in self.placement:
            found.append(seen[home])
            seen[home] += 1
        return tuple(found)

    def __str__(self) -> str:
        return "\n".join(" ".join(map(str, row)) for row in self.rows)


def table_of(rows: list[list[Action]]) -> Table:
    """A table from rows alone: the forwards say which rank holds a stage and how many microbatches
    there are.

    Raises ValueError where they do not: no forward, a stage on two ranks, a gap in the stages or
    microbatches.
    """
    home: dict[int, int] = {}
    batches: set[int] = set()
    for rank, row in enumerate(rows):
        for action in row:
            if action.kind == "F":
                if home.setdefault(action.stage, rank) != rank:
                    raise ValueError(
                        f"stage {action.stage} runs forward on rank {home[action.stage]} and on "
                        f"rank {rank}"
                    )
                batches.add(int(action.microbatch or 0))
    if not home:
        raise ValueError("the table has no forward action (such as 0F0)")
    for what, seen in (("stage", set(home)), ("microbatch", batches)):
        if max(seen) >= len(
            seen
        ):  # a number of any size may stand in a cell: count what is there, not up to it
            gap = next(number for number in range(len(seen)) if number not in seen)
            raise ValueError(
                f"no rank runs forward for {what} {gap}, yet there is a {what} {max(seen)}"
            )
    placement = tuple(home[stage] for stage in range(len(home)))
    return Table(tuple(map(tuple, rows)), len(home), len(batches), placement)


def read_csv(path: str | Path) -> Table:
    """Read a table: one line a rank, one action a cell (or two that overlap), empty cells skipped.

    Raises ValueError naming the file, the rank and the cell where a cell is no action.
    """
    with open(
        path, newline="", encoding="utf-8-sig"
    ) as file:  # spreadsheets write a byte-order mark
        lines = csv.reader(file)
        try:
            return table_of([_row(rank, cells) for rank, cells in enumerate(lines)])
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{path}: it is no UTF-8 text ({error.object[error.start]:#04x} in it)"
            ) from None
        except csv.Error:
            words = (
                f"is no list of actions with commas, or has a cell of over "
                f"{csv.field_size_limit():,} characters"
            )
            raise ValueError(f"{path}: line {lines.line_num} {words}") from None
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None


def _row(rank: int, cells: list[str]) -> list[Action]:
    row: list[Action] = []
    for column, cell in enumerate(cells):
        try:
            row += parse_cell(cell)
        except ValueError as error:
            raise ValueError(f"rank {rank}, cell {column}: {error}") from None
    return row


def write_csv(table: Table, path: str | Path) -> None:
    """Write a table, one line a rank, one action a cell."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([[str(action) for action in row] for row in table.rows])
