"""torch's own pipelining as the oracle: the same order of compute, and each reads what the other
writes.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.pipelining import schedules as theirs

from workbench.schedules import (
    Table,
    generate,
    in_flight,
    lower,
    parse_action,
    read_csv,
    simulate,
    table_of,
    uniform,
    validate,
    write_csv,
)

ORDERS = {"gpipe": theirs.ScheduleGPipe, "1f1b": theirs.Schedule1F1B}
MULTI = {
    ("interleaved", 2): theirs.ScheduleInterleaved1F1B,
    ("interleaved", 3): theirs.ScheduleInterleaved1F1B,
    ("zb-h1", 1): theirs.ScheduleInterleavedZeroBubble,
    ("zb-v", 2): theirs.ScheduleZBVZeroBubble,
    ("dualpipe-v", 2): theirs.ScheduleDualPipeV,
}
ALL = [("gpipe", 1), ("1f1b", 1), ("eager-1f1b", 1), ("zb-h2", 1), *MULTI]


def order_of(kind: type, ranks: int, microbatches: int) -> dict[int, list[Any]]:
    """The order of one of torch's one-stage schedules, without a process group."""
    schedule: Any = object.__new__(kind)
    schedule._num_stages, schedule._n_microbatches = ranks, microbatches
    order: dict[int, list[Any]] = schedule._get_pipeline_order()
    return order


def multi_stage_order(
    kind: type, ranks: int, microbatches: int, chunks: int
) -> dict[int, list[Any]]:
    """The order of one of torch's several-stage schedules, without a process group."""
    schedule: Any = object.__new__(kind)
    schedule.pp_group_size, schedule._n_microbatches = ranks, microbatches
    schedule._num_stages = schedule.num_stages = ranks * chunks
    schedule.n_local_stages = chunks
    schedule.number_of_rounds = max(1, microbatches // ranks)
    schedule.microbatches_per_round = microbatches // schedule.number_of_rounds
    return {rank: schedule._calculate_single_rank_operations(rank) for rank in range(ranks)}


def rows_of(order: dict[int, list[Any]]) -> list[list[str]]:
    """Rows of compute actions; of a forward and a backward that overlap, one after the other."""
    rows = [
        [b for a in order[rank] if a is not None for b in a.sub_actions or (a,)]
        for rank in sorted(order)
    ]
    return [[str(a) for a in row if "REDUCE" not in str(a)] for row in rows]


def table_from(order: dict[int, list[Any]]) -> Table:
    return table_of([[parse_action(cell) for cell in row] for row in rows_of(order)])


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 3), (2, 2), (4, 4), (4, 9), (8, 16)])
def test_compute_order_is_torchs(name: str, ranks: int, microbatches: int) -> None:
    """All ranks but the last of 1F1B, where torch 2.13's drawing numbers the forwards from 1: there
    the kinds only.
    """
    ours = [[str(a) for a in row] for row in generate(name, ranks, microbatches).rows]
    torchs = rows_of(order_of(ORDERS[name], ranks, microbatches))
    if name == "1f1b":
        assert [parse_action(a).kind for a in ours.pop()] == [
            parse_action(a).kind for a in torchs.pop()
        ]
    assert ours == torchs


@pytest.mark.parametrize(("name", "chunks"), MULTI)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_compute_order_of_several_stages_is_torchs(
    name: str, chunks: int, ranks: int, rounds: int
) -> None:
    """The same rows, so the same bubble and the same activations in flight, whatever the
    durations.
    """
    microbatches = rounds * ranks * (2 if name == "dualpipe-v" else 1)
    torchs = table_from(multi_stage_order(MULTI[name, chunks], ranks, microbatches, chunks))
    ours = generate(name, ranks, microbatches, chunks)
    assert ours == torchs
    durations = uniform(ours.stages, 1.0, 1.3, 0.7)
    assert simulate(ours, durations).bubbles == simulate(torchs, durations).bubbles
    assert in_flight(ours) == in_flight(torchs)


@pytest.mark.parametrize(("ranks", "microbatches"), [(3, 1), (4, 5), (4, 6), (8, 11)])
def test_zb_v_that_does_not_fill_is_torchs(ranks: int, microbatches: int) -> None:
    torchs = multi_stage_order(theirs.ScheduleZBVZeroBubble, ranks, microbatches, 2)
    assert generate("zb-v", ranks, microbatches, 2) == table_from(torchs)


@pytest.mark.parametrize(("name", "chunks"), ALL)
def test_torch_reads_and_runs_our_lowered_csv(tmp_path: Path, name: str, chunks: int) -> None:
    table = lower(generate(name, 4, 8, chunks))
    write_csv(table, tmp_path / "t.csv")
    rows = [line.split(",") for line in (tmp_path / "t.csv").read_text().splitlines()]
    order = {rank: [theirs._Action.from_str(cell) for cell in row] for rank, row in enumerate(rows)}
    assert [[str(a) for a in order[rank]] for rank in order] == [
        [str(a) for a in row] for row in table.rows
    ]
    homes = theirs._validate_schedule(order, 4, table.stages, 8)
    assert tuple(homes[stage] for stage in range(table.stages)) == table.placement
    transfers = {rank: [a for a in row if "REDUCE" not in str(a)] for rank, row in order.items()}
    theirs._simulate_comms_compute(transfers, lambda stage: table.placement[stage], table.stages)


@pytest.mark.parametrize(("name", "chunks"), MULTI)
def test_we_read_torchs_csv(tmp_path: Path, name: str, chunks: int) -> None:
    """Its idle cells are empty, and its DualPipe-V has cells such as (0F4;7B0)OVERLAP_F_B."""
    order = multi_stage_order(MULTI[name, chunks], 4, 8, chunks)
    with open(tmp_path / "t.csv", "w", newline="") as file:
        csv.writer(file).writerows(order[rank] for rank in sorted(order))
    assert read_csv(tmp_path / "t.csv") == generate(name, 4, 8, chunks)
    assert ("OVERLAP_F_B" in (tmp_path / "t.csv").read_text()) == (name == "dualpipe-v")


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8)])
def test_a_table_that_no_generator_makes_lowers_and_runs(ranks: int, microbatches: int) -> None:
    """torch's zero-bubble schedule of two chunks a rank: several stages a rank with split
    backward.
    """
    torchs = multi_stage_order(theirs.ScheduleInterleavedZeroBubble, ranks, microbatches, 2)
    table = table_from(torchs)
    lowered = lower(table)
    assert validate(table) == [] and validate(lowered) == []
    simulate(lowered, uniform(table.stages), 0.1, transport="rendezvous")
