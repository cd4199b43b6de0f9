"""torch's own pipelining as the oracle: the same order of compute, and each reads what the other writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.distributed.pipelining import schedules as theirs

from workbench.schedules import generate, in_flight, lower, parse, simulate, table_of, uniform, validate, write_csv

ORDERS = {"gpipe": theirs.ScheduleGPipe, "1f1b": theirs.Schedule1F1B}
MULTI = {
    "interleaved": (theirs.ScheduleInterleaved1F1B, "loop"),
    "zero-bubble": (theirs.ScheduleInterleavedZeroBubble, "loop"),
    "zb-v": (theirs.ScheduleZBVZeroBubble, "v"),
}


def order_of(kind: type, ranks: int, microbatches: int) -> dict[int, list[Any]]:
    """The order of one of torch's one-stage schedules, without a process group."""
    schedule = object.__new__(kind)
    schedule._num_stages, schedule._n_microbatches = ranks, microbatches
    return schedule._get_pipeline_order()


def rows_of(order: dict[int, list[Any]]) -> list[list[str]]:
    return [[str(a) for a in order[rank] if a is not None and "REDUCE" not in str(a)] for rank in sorted(order)]


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 3), (2, 2), (4, 4), (4, 9), (8, 16)])
def test_compute_order_is_torchs(name: str, ranks: int, microbatches: int) -> None:
    """All ranks but the last of 1F1B, where torch 2.13's drawing numbers the forwards from 1: there the kinds only."""
    ours = [[str(a) for a in row] for row in generate(name, ranks, microbatches).rows]
    torchs = rows_of(order_of(ORDERS[name], ranks, microbatches))
    if name == "1f1b":
        assert [parse(a).kind for a in ours.pop()] == [parse(a).kind for a in torchs.pop()]
    assert ours == torchs


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_torch_reads_and_runs_our_lowered_csv(tmp_path: Path, name: str) -> None:
    table = lower(generate(name, 4, 6))
    write_csv(table, tmp_path / "t.csv")
    rows = [line.split(",") for line in (tmp_path / "t.csv").read_text().splitlines()]
    order = {rank: [theirs._Action.from_str(cell) for cell in row] for rank, row in enumerate(rows)}
    assert [[str(a) for a in order[rank]] for rank in order] == [[str(a) for a in row] for row in table.rows]
    transfers = {rank: [a for a in row if "REDUCE" not in str(a)] for rank, row in order.items()}
    theirs._simulate_comms_compute(transfers, lambda stage: stage, 4)


def multi_stage_order(kind: type, style: str, ranks: int, microbatches: int, chunks: int = 2) -> list[list[str]]:
    """Rows of one of torch's several-stage schedules, without a process group."""
    schedule = object.__new__(kind)
    schedule.pp_group_size, schedule._n_microbatches, schedule._num_stages = ranks, microbatches, ranks * chunks
    schedule.n_local_stages = chunks
    schedule.number_of_rounds = max(1, microbatches // ranks)
    schedule.microbatches_per_round = microbatches // schedule.number_of_rounds
    if style == "v":
        schedule.num_stages = ranks * chunks
    order = {rank: schedule._calculate_single_rank_operations(rank) for rank in range(ranks)}
    return rows_of(order)


@pytest.mark.parametrize("name", MULTI)
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8)])
def test_any_table_of_torchs_lowers_and_runs(name: str, ranks: int, microbatches: int) -> None:
    """Tables that no generator of ours makes: several stages a rank, split backward, V-shaped placement."""
    rows = multi_stage_order(*MULTI[name], ranks, microbatches)
    table = table_of([[parse(cell) for cell in row] for row in rows])
    lowered = lower(table)
    assert validate(table) == [] and validate(lowered) == []
    simulate(lowered, uniform(table.stages), 0.1, rendezvous=True)


def test_interleaved_in_flight_is_that_of_the_paper() -> None:
    """2(p-i-1) + (V-1)p + 1 chunks on rank i (arXiv 2104.04473): 11, 9, 7, 5 for p = 4, V = 2."""
    rows = multi_stage_order(*MULTI["interleaved"], 4, 8)
    assert in_flight(table_of([[parse(cell) for cell in row] for row in rows])) == (11, 9, 7, 5)
