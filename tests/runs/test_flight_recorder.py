"""Which rank a stall is blamed on, by flight recorder dumps: of torch's layout, and of torch."""

from __future__ import annotations

import os
import pickle
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from workbench.engine.verify.forked_ranks import run_ranks
from workbench.runs.diagnose.flight_recorder import PREFIX, read_dump, read_dumps
from workbench.runs.diagnose.stalled_collective import Stall, find_stall

GROUPS = {"0": [0, 1, 2, 3], "1": [0, 1], "2": [2, 3], "3": [0, 2], "4": [1, 3]}
NAMES = {"0": "default_pg", "1": "tensor", "2": "tensor", "3": "data", "4": "data"}
FRAMES = [
    {"name": "all_reduce", "filename": "/env/torch/distributed/distributed_c10d.py", "line": 3245},
    {"name": "sum_loss", "filename": "/src/workbench/engine/session.py", "line": 321},
]


def entry(group: str, sequence: int, name: str = "all_reduce", state: str = "started") -> Any:
    return {
        "pg_id": int(group),
        "process_group": (group, NAMES[group]),
        "collective_seq_id": sequence,
        "p2p_seq_id": 0,
        "op_id": sequence,
        "profiling_name": f"nccl:{name}",
        "input_sizes": [[8, 4]],
        "state": state,
        "retired": state == "completed",
        "is_p2p": " " in name,
        "frames": FRAMES,
    }


def batch(group: str, number: int, name: str, state: str = "completed") -> list[Any]:
    """A send or recv as NCCL's process group records those of batches: without events of its own,
    and so "scheduled" for ever, before an entry that has them.
    """
    whole = {**entry(group, 0, "coalesced", state), "is_p2p": True}
    return [{**one, "p2p_seq_id": number} for one in (entry(group, 0, name, "scheduled"), whole)]


def done(group: str, sequence: int, name: str = "all_reduce") -> Any:
    return entry(group, sequence, name, "completed")


def dump(*entries: Any, dropped: int = 0) -> dict[str, Any]:
    numbered = [{**one, "record_id": dropped + i} for i, one in enumerate(entries)]
    config = {g: {"name": g, "desc": NAMES[g], "ranks": str(r)} for g, r in GROUPS.items()}
    return {"version": "2.10", "pg_config": config, "entries": numbered}


def stall(folder: Path, **dumps: dict[str, Any]) -> Stall | None:
    (folder / "logs").mkdir()
    for rank, content in dumps.items():
        (folder / "logs" / f"{PREFIX}{rank[1:]}").write_bytes(pickle.dumps(content, protocol=2))
    return find_stall(read_dumps(folder))


def test_the_rank_that_did_not_enter_is_blamed(tmp_path: Path) -> None:
    waits = dump(done("0", 1), entry("0", 2))
    found = stall(tmp_path, r0=waits, r1=waits, r2=dump(done("0", 1), done("2", 7)), r3=waits)
    assert found is not None and found.rank == 2
    assert found.message == (
        "rank 2 did not enter all-reduce 2 of the group of ranks 0, 1, 2, 3, in which "
        "ranks 0, 1, 3 wait; its last call was all-reduce 7 of the tensor group of ranks 2, 3 "
        "(session.py:321)"
    )


def test_the_rank_at_the_end_of_a_chain_is_blamed(tmp_path: Path) -> None:
    """0 waits for 1 in their tensor group, 1 for 3 in data, and 3 is in no call at all."""
    found = stall(
        tmp_path,
        r0=dump(done("3", 4), entry("1", 5, "_all_gather_base")),
        r1=dump(entry("4", 4)),
        r2=dump(done("3", 4)),
        r3=dump(done("4", 3), done("2", 9)),
    )
    assert found is not None and found.rank == 3
    assert "all-reduce 4 of the data group of ranks 1, 3, in which rank 1 waits" in found.message


def test_a_rank_without_a_dump_is_blamed_by_those_that_wait_for_it(tmp_path: Path) -> None:
    found = stall(tmp_path, r0=dump(done("1", 1), entry("1", 2)), r2=dump(done("3", 1)))
    assert found is not None and found.rank == 1
    assert found.message.startswith("rank 1 left no record of its calls, as of all-reduce 2 of")


def test_different_collectives_in_one_place_are_told(tmp_path: Path) -> None:
    found = stall(tmp_path, r0=dump(entry("1", 5)), r1=dump(entry("1", 5, "_reduce_scatter_base")))
    assert found is not None and found.rank == 1
    assert "rank 1 is in reduce-scatter (session.py:321) where rank 0 is in" in found.message


def test_a_recv_waits_for_the_rank_that_does_not_send(tmp_path: Path) -> None:
    found = stall(
        tmp_path,
        r0=dump(done("3", 1, "send 0->1"), done("1", 1)),
        r2=dump(done("3", 1, "recv 1<-0"), entry("3", 2, "recv 1<-0")),
    )
    assert found is not None and found.rank == 0
    assert (
        "recv from rank 0 in the data group of ranks 0, 2, in which rank 2 waits" in found.message
    )


def test_sends_and_recvs_of_batches_are_done_when_their_batch_is(tmp_path: Path) -> None:
    """Rank 0 is on its host, and rank 2 in the recv that follows."""
    found = stall(
        tmp_path,
        r0=dump(*batch("3", 1, "send 0->1"), *batch("3", 2, "recv 0<-1")),
        r2=dump(
            *batch("3", 1, "recv 1<-0"),
            *batch("3", 2, "send 1->0"),
            *batch("3", 3, "recv 1<-0", "scheduled"),
        ),
    )
    assert found is not None and found.rank == 0
    assert "recv from rank 0 in the data group of ranks 0, 2, in which rank 2" in found.message


def test_sends_that_are_over_do_not_hide_a_collective(tmp_path: Path) -> None:
    """All but rank 2 are in all-reduce 2. Until NCCL's timing is on, nothing has "started"."""
    waits = entry("0", 2, state="scheduled")
    found = stall(
        tmp_path,
        r0=dump(*batch("3", 1, "send 0->1"), done("0", 1), waits),
        r1=dump(*batch("4", 1, "send 0->1"), done("0", 1), waits),
        r2=dump(*batch("3", 1, "recv 1<-0"), done("0", 1)),
        r3=dump(*batch("4", 1, "recv 1<-0"), done("0", 1), waits),
    )
    assert found is not None and found.rank == 2 and "all-reduce 2" in found.message


def test_what_a_dump_proves_goes_before_a_dump_that_is_lost(tmp_path: Path) -> None:
    waits = dump(done("0", 1), entry("0", 2))
    found = stall(tmp_path, r0=waits, r2=dump(done("0", 1)), r3=waits)
    assert found is not None and found.rank == 2 and "rank 2 did not enter" in found.message


def test_ranks_that_wait_for_each_other_are_told_together(tmp_path: Path) -> None:
    found = stall(
        tmp_path,
        r0=dump(entry("1", 1)),
        r1=dump(entry("4", 1)),
        r2=dump(entry("3", 1)),
        r3=dump(entry("2", 1)),
    )
    assert found is not None and found.message.startswith("ranks wait for each other: rank 0 in")
    assert all(f"rank {rank} in all-reduce 1" in found.message for rank in range(4))


def test_two_sends_that_need_each_others_recv_wait_for_each_other(tmp_path: Path) -> None:
    found = stall(
        tmp_path, r0=dump(entry("3", 1, "send 0->1")), r2=dump(entry("3", 1, "send 1->0"))
    )
    assert found is not None and found.message == (
        "ranks wait for each other: rank 0 in send to rank 2 in the data group of ranks 0, 2 "
        "(session.py:321), rank 2 in send to rank 0 in the data group of ranks 0, 2 "
        "(session.py:321)"
    )


def test_a_call_that_all_entered_is_the_networks(tmp_path: Path) -> None:
    found = stall(tmp_path, r0=dump(entry("1", 5)), r1=dump(entry("1", 5)))
    assert found is not None and found.rank is None and found.network
    assert "every rank entered all-reduce 5 of the tensor group of ranks 0, 1" in found.message


def test_what_the_recorder_dropped_blames_nobody(tmp_path: Path) -> None:
    """Rank 1 has made thousands of calls since its last one of the tensor group."""
    busy = dump(*(done("4", n) for n in range(900, 910)), entry("4", 910), dropped=5000)
    found = stall(tmp_path, r0=dump(entry("1", 5)), r1=busy, r3=dump(done("4", 909), dropped=9))
    assert found is not None and found.rank == 3


def test_ranks_that_completed_everything_do_not_stall(tmp_path: Path) -> None:
    assert stall(tmp_path, r0=dump(done("1", 5)), r1=dump(done("1", 5))) is None


class Harmful:
    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)

    def __init__(self, path: str) -> None:
        self.path = path


def test_a_dump_that_names_a_function_is_not_read_and_calls_nothing(tmp_path: Path) -> None:
    made = tmp_path / "made"
    path = tmp_path / "dump"
    path.write_bytes(pickle.dumps({**dump(entry("1", 1)), "more": Harmful(str(made))}))
    assert read_dump(path, 0) is None and not made.exists()


@pytest.mark.parametrize("left", [0, 1, 50, 400])
def test_a_torn_dump_is_passed_over(tmp_path: Path, left: int) -> None:
    path = tmp_path / "dump"
    path.write_bytes(pickle.dumps(dump(entry("1", 1)), protocol=2)[:left])
    assert read_dump(path, 0) is None


@pytest.mark.parametrize("content", [[], {}, {"pg_config": {}}, {**dump(), "entries": [3]}, 7])
def test_other_content_is_passed_over(tmp_path: Path, content: Any) -> None:
    path = tmp_path / "dump"
    path.write_bytes(pickle.dumps(content))
    assert read_dump(path, 0) is None


def recorded(folder: Path, rank: int) -> None:
    """Two all-reduces, of which rank 1 enters one; rank 0 writes its dump."""
    os.environ["TORCH_FR_BUFFER_SIZE"] = "100"
    group = dist.new_group([0, 1], group_desc="tensor", timeout=timedelta(seconds=3))
    dist.all_reduce(torch.ones(4), group=group)
    if rank == 0:
        work = dist.all_reduce(torch.ones(4), group=group, async_op=True)
        path = folder / f"{PREFIX}0"
        written = getattr(torch._C._distributed_c10d, "_dump_fr_trace")  # noqa: B009
        for _ in range(100):  # gloo's thread says that the first is over, a moment after the wait
            path.write_bytes(written())
            if (found := read_dump(path, 0)) is not None and found.calls[-2].done:
                break
            time.sleep(0.02)
        assert work is not None
        with pytest.raises(RuntimeError):
            work.wait()


def test_a_dump_of_torch_is_read(tmp_path: Path) -> None:
    run_ranks(2, partial(recorded, tmp_path))
    found = read_dump(tmp_path / f"{PREFIX}0", 0)
    assert found is not None
    first, second = found.calls[-2:]
    assert (first.what, first.done, second.done) == ("all-reduce", True, False)
    assert second.sequence == first.sequence + 1 and second.frame.startswith("test_flight_rec")
    assert found.waiting == second
