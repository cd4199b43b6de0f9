"""The order of all ranks' calls, replayed on the strictest transport."""

import random
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from tests.parallel.small import CHUNKS, GPT, LLAMA
from tests.parallel.sweep import all_choices, check_choice
from workbench.engine import session
from workbench.parallel import mesh
from workbench.parallel.expert import expert_collectives
from workbench.parallel.pipeline import stage_transfers
from workbench.plan import schedule_table
from workbench.plan.schema import Plan
from workbench.rehearsal import order_check
from workbench.rehearsal.call_trace import STORE, Call
from workbench.rehearsal.order_check import check_order
from workbench.rehearsal.strict_replay import replay
from workbench.schedules import generate, lowering, write_csv


def planned(gpus: int, strategy: dict[str, Any], model: dict[str, Any] = LLAMA) -> Plan:
    training = {"sequence_length": 8, "global_batch": 4 * gpus, "micro_batch": 1}
    if isinstance(strategy.get("tensor", {}).get("size"), list):
        training["micro_batch"] = 2
    return Plan.model_validate(
        {
            "model": model,
            "cluster": {"gpu": "h100-sxm-80gb", "gpus": gpus},
            "strategy": strategy,
            "training": training,
        }
    )


def collective(*ranks: int, kind: str = "all_reduce", numel: int = 1) -> Call:
    return Call(kind, "data", ranks, "float32", numel)


def p2p(kind: str, peer: int, batch: int, numel: int = 1) -> Call:
    return Call(kind, "pipeline", (0, 1), "float32", numel, peer, batch)


CONNECT = Call("all_reduce", "pipeline", (0, 1), "float32", 1)
BROADCAST = collective(0, 1, kind="broadcast")._replace(peer=0)
MAKING = Call("making", STORE, (0, 1), "groups [[0, 1]]", 0)


def rows(sent: tuple[int, ...], received: tuple[int, ...]) -> Call:
    return collective(0, 1, kind="all_to_all")._replace(sent=sent, received=received)


@pytest.mark.parametrize(
    ("traces", "expected"),
    [
        ({0: [collective(0, 1)], 1: [collective(0, 1)]}, None),
        ({0: [collective(0, 1)], 1: []}, "never use it"),
        ({0: [collective(0, 1), collective(0, 1)], 1: [collective(0, 1)]}, "rank 0 waits for ever"),
        ({0: [collective(0, 1)], 1: [collective(0, 1, numel=2)]}, "disagree"),
        ({0: [collective(0, 1)], 1: [collective(0, 1, kind="broadcast")]}, "disagree"),
        ({0: [p2p("send", 1, 1)], 1: [p2p("recv", 0, 1)]}, "not connected by all"),
        ({0: [CONNECT, p2p("send", 1, 1)], 1: [CONNECT, p2p("recv", 0, 1)]}, None),
        (
            {0: [CONNECT, p2p("send", 1, 1)], 1: [CONNECT, p2p("recv", 0, 1, numel=2)]},
            "rank 1 calls recv of 2",
        ),
        (  # both send first
            {
                0: [CONNECT, p2p("send", 1, 1), p2p("recv", 1, 2)],
                1: [CONNECT, p2p("send", 0, 1), p2p("recv", 0, 2)],
            },
            "waits for ever",
        ),
        (  # in one batch each
            {
                0: [CONNECT, p2p("send", 1, 1), p2p("recv", 1, 1)],
                1: [CONNECT, p2p("send", 0, 1), p2p("recv", 0, 1)],
            },
            None,
        ),
        (  # rank 0's batch needs its receive to progress, which rank 1 sends later
            {
                0: [CONNECT, p2p("send", 1, 1), p2p("recv", 1, 1)],
                1: [CONNECT, p2p("recv", 0, 1), p2p("send", 0, 2)],
            },
            "waits for ever",
        ),
        ({0: [collective(0, 1)._replace(on_host=True)], 1: [collective(0, 1)]}, "host memory"),
        ({0: [BROADCAST], 1: [BROADCAST._replace(peer=1)]}, "with root rank 1"),
        ({0: [rows((1, 2), (1, 3))], 1: [rows((3, 1), (2, 1))]}, None),
        ({0: [rows((1, 2), (1, 3))], 1: [rows((3, 1), (3, 1))]}, "0 sends 2 rows to rank 1"),
        ({0: [MAKING], 1: []}, "never use it"),
        ({0: [MAKING], 1: [MAKING._replace(dtype="groups [[1, 0]]")]}, "disagree"),
        ({0: [MAKING, CONNECT], 1: [CONNECT, MAKING]}, "waits for ever"),
    ],
)
def test_the_replay_hangs_where_nccl_may(
    traces: dict[int, list[Call]], expected: str | None
) -> None:
    problems = replay(traces)
    assert problems == [] if expected is None else any(expected in text for text in problems)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_pipelines_cannot_hang(schedule: str) -> None:
    pipeline = {"size": 2, "schedule": schedule, "chunks": CHUNKS[schedule]}
    found = check_order(planned(2, {"pipeline": pipeline}))
    assert found.problems == () and found.traced == found.world_size == 2 and found.calls > 0


@pytest.mark.slow
@pytest.mark.parametrize("schedule", CHUNKS)
def test_every_schedule_beside_tensor_ranks_cannot_hang(schedule: str) -> None:
    pipeline = {"size": 2, "schedule": schedule, "chunks": CHUNKS[schedule]}
    assert check_order(planned(4, {"pipeline": pipeline, "tensor": {"size": 2}})).problems == ()


MOE = LLAMA | {"moe": {"experts": 4, "top_k": 2, "ffn": 32}}
GRID = {"tensor": {"size": [2, 2], "algorithm": "2d"}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gpus", "strategy", "model"),
    [
        (4, {"data": {"zero": 3, "shard": 2}}, LLAMA),
        (4, {"context": {"size": 4}}, LLAMA),
        (4, {"context": {"size": 4, "algorithm": "usp", "ulysses_size": 2}}, LLAMA),
        (4, GRID, GPT | {"tied": True}),
        (2, {"data": {"zero": 3, "offload": "parameters"}}, LLAMA),
        (4, {"expert": {"size": 2}}, MOE),
        (2, {"expert": {"size": 2}}, LLAMA | {"moe": {"experts": 6, "top_k": 1, "ffn": 32}}),
    ],
    ids=str,
)
def test_every_axis_cannot_hang(gpus: int, strategy: dict[str, Any], model: dict[str, Any]) -> None:
    assert check_order(planned(gpus, strategy, model)).problems == ()


@pytest.mark.slow
def test_a_large_world_is_traced_by_symmetry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order_check, "DRAWN", 3)
    strategy = {"pipeline": {"size": 2}, "tensor": {"size": 2}, "context": {"size": 2}}
    found = check_order(planned(32, strategy))
    assert found.problems == () and 2 <= found.traced <= 5


@pytest.mark.slow
def test_symmetry_that_does_not_hold_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order_check, "TRACED_WHOLE", 1)
    monkeypatch.setattr(order_check, "rank_classes", lambda plan, meshes: [(0,)] * len(meshes))
    assert any("does not call" in text for text in check_order(planned(2, PIPELINE)).problems)


PIPELINE = {"pipeline": {"size": 2, "schedule": "gpipe"}}


@pytest.mark.slow
def test_transfers_merged_into_batches_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A send and a receive in one batch, of which the peer's end is in two."""
    pending: list[dist.P2POp] = []

    def start(call: Any, x: Tensor, peer: int, axis: Any) -> dist.Work:
        if pending and pending[0].group is not axis.group:
            pending.clear()  # of the rank that was traced before
        pending.append(dist.P2POp(call, x, axis.ranks[peer], axis.group))
        if call is dist.isend and axis.index == 0:
            return dist.Work()  # posted together with the receive that follows
        works = dist.batch_isend_irecv(list(pending))
        pending.clear()
        return works[-1]

    monkeypatch.setattr(stage_transfers, "_start", start)
    monkeypatch.setattr(dist.Work, "wait", lambda self: True)
    assert any("waits for ever" in text for text in check_order(planned(2, PIPELINE)).problems)


@pytest.mark.slow
def test_receives_out_of_the_order_of_sends_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """As late as possible: a rank then sends while its peer sends too."""

    def just_in_time(table: Any, _: float) -> list[list[Any]]:
        rows: list[list[Any]] = []
        for row in table.rows:
            around = [
                (lowering.transfer_before(table, a), a, lowering.transfer_after(table, a))
                for a in row
            ]
            rows.append([a for three in around for a in three if a is not None])
        return rows

    monkeypatch.setattr(lowering, "_in_order_of_sends", just_in_time)
    monkeypatch.setattr(session, "_sends_end", lambda *_: defaultdict(lambda: 10**9))
    strategy = {"pipeline": {"size": 2, "schedule": "1f1b"}}
    lowering.executable.cache_clear()
    try:
        problems = check_order(planned(2, strategy)).problems
    finally:
        lowering.executable.cache_clear()  # of what is planted
    assert any("waits for ever" in text for text in problems)


@pytest.mark.slow
def test_another_root_on_every_rank_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    reduce: Any = dist.reduce

    def to_itself(x: Tensor, *args: Any, group: Any, group_dst: int, **kwargs: Any) -> Any:
        return reduce(x, *args, group=group, group_dst=dist.get_rank(group), **kwargs)

    monkeypatch.setattr(dist, "reduce", to_itself)
    problems = check_order(planned(4, GRID)).problems
    assert any("disagree" in text and "with root" in text for text in problems)


@pytest.mark.slow
def test_rows_that_another_rank_does_not_expect_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    all_to_all = expert_collectives._all_to_all

    def one_less(x: Tensor, sent: list[int], received: list[int], axis: Any) -> Tensor:
        if axis.index == 0:
            sent = [sent[0] + 1, sent[1] - 1, *sent[2:]]
        return all_to_all(x, sent, received, axis)

    monkeypatch.setattr(expert_collectives, "_all_to_all", one_less)
    problems = check_order(planned(2, {"expert": {"size": 2}}, MOE)).problems
    assert any("rows to rank" in text for text in problems)


@pytest.mark.slow
def test_a_pair_whose_group_the_others_do_not_make_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pairs = schedule_table.transfer_pairs
    own = {"rank": 0}

    def of_own(plan: Any) -> list[tuple[int, int]]:
        return [pair for pair in pairs(plan) if own["rank"] in pair]

    def trace(plan: Any, rank: int) -> list[Call]:
        own["rank"] = rank
        return order_check_trace(plan, rank)

    order_check_trace = order_check.trace
    monkeypatch.setattr(mesh, "transfer_pairs", of_own)
    monkeypatch.setattr(order_check, "trace", trace)
    pipeline = {"size": 4, "schedule": "dualpipe-v", "chunks": 2}
    assert check_order(planned(4, {"pipeline": pipeline}, LLAMA | {"layers": 8})).problems


def test_a_table_of_many_microbatches_is_checked_whole(tmp_path: Path) -> None:
    write_csv(generate("1f1b", 2, 8), tmp_path / "s.csv")
    pipeline = {"size": 2, "schedule": str(tmp_path / "s.csv")}
    plan = planned(2, {"pipeline": pipeline}).replace(**{"training.global_batch": 8})
    found = check_order(plan)
    assert found.problems == () and found.microbatches == 8


@pytest.mark.slow
def test_a_group_that_not_all_ranks_use_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exchange of a tied weight on a grid, as the first call of the tensor group."""
    monkeypatch.setattr(mesh, "_connect", lambda group, device: None)
    problems = check_order(planned(4, GRID, GPT | {"tied": True})).problems
    assert any("not connected by all of its ranks" in text for text in problems)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("count", [4, pytest.param(20, marks=pytest.mark.sweep)])
def test_drawn_plans_cannot_hang(count: int) -> None:
    drawn = random.Random(0).sample(list(all_choices(seed=0)), count)
    failed = [found for found in map(check_choice, drawn) if not found["passed"]]
    assert not failed, "\n".join(map(str, failed))


def test_problems_are_few_and_in_words() -> None:
    calls: Sequence[Call] = [collective(0, 1, numel=n) for n in range(1, 30)]
    problems = replay({0: calls, 1: calls[:3]})
    assert problems == ["rank 0 waits for ever in all_reduce of 4 x float32 on group data (0, 1)"]
