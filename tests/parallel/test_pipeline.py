"""Every schedule equals one device: named ones and drawn ones, several stages a rank, split
backward, tied weights.
"""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parallel.small import CHUNKS, GPT, plan
from tests.parallel.test_equality import assert_equal_to_one_device
from workbench.engine.session import Session
from workbench.engine.verify.equivalence import verify
from workbench.engine.verify.forked_ranks import run_ranks
from workbench.engine.verify.single_device import verification_weight
from workbench.errors import PlanError
from workbench.models import Transformer
from workbench.parallel.mesh import build_mesh
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.schema import Plan
from workbench.schedules import Action, Table, validate, write_csv

SPLIT_OR_CHUNKED = [name for name in CHUNKS if name not in ("gpipe", "1f1b", "eager-1f1b")]


def scheduled(
    name: str,
    tensor: int = 1,
    pipeline: int = 2,
    data: int = 1,
    chunks: int | None = None,
    changes: dict[str, Any] | None = None,
    **more: Any,
) -> Plan:
    """A small plan of a schedule, one layer at least a stage."""
    chunks = chunks or CHUNKS[name]
    by_path = {
        "strategy.pipeline.schedule": name,
        "strategy.pipeline.chunks": chunks,
        **(changes or {}),
    }
    more = {"layers": max(4, pipeline * chunks), "microbatches": 2 * pipeline, **more}
    return plan(tensor, pipeline, data, changes=by_path, **more)


@pytest.mark.parametrize(
    "tied",
    [pytest.param(False, id="untied", marks=pytest.mark.slow), pytest.param(True, id="tied")],
)
@pytest.mark.parametrize("name", SPLIT_OR_CHUNKED)
def test_two_ranks(name: str, tied: bool) -> None:
    assert_equal_to_one_device(verify(scheduled(name, shape=GPT, tied=tied)))


@pytest.mark.slow
@pytest.mark.parametrize("name", SPLIT_OR_CHUNKED)
def test_four_ranks(name: str) -> None:
    assert_equal_to_one_device(verify(scheduled(name, pipeline=4, tied=True)))


@pytest.mark.slow
@pytest.mark.parametrize("name", SPLIT_OR_CHUNKED)
def test_within_tensor_and_data_parallelism(name: str) -> None:
    assert_equal_to_one_device(verify(scheduled(name, tensor=2, data=2, tied=True)))


@pytest.mark.slow
@pytest.mark.parametrize("name", SPLIT_OR_CHUNKED)
def test_fp32(name: str) -> None:
    assert_equal_to_one_device(verify(scheduled(name, tensor=2, shape=GPT), "fp32"))


@pytest.mark.parametrize(
    ("name", "most"),
    [("eager-1f1b", None), ("eager-1f1b", [4, 2, 2, 1]), ("1f1b", 1), ("1f1b", [9, 2, 2, 1])],
)
def test_warm_ups(name: str, most: int | list[int] | None) -> None:
    changes = {"strategy.pipeline.in_flight": most}
    assert_equal_to_one_device(verify(scheduled(name, pipeline=4, tied=True, changes=changes)))


@pytest.mark.parametrize(
    ("name", "microbatches"),
    [("1f1b", 2), ("eager-1f1b", 3), ("gpipe", 1), ("zb-h1", 3), ("zb-h2", 1), ("zb-v", 2)],
)
def test_fewer_microbatches_than_ranks(name: str, microbatches: int) -> None:
    assert_equal_to_one_device(
        verify(scheduled(name, pipeline=4, microbatches=microbatches, tied=True))
    )


@pytest.mark.parametrize(
    ("name", "legal"), [("interleaved", "legal: 8"), ("dualpipe-v", "at least 16")]
)
def test_too_few_microbatches_are_refused_with_the_numbers(name: str, legal: str) -> None:
    with pytest.raises(
        PlanError, match=rf"training\.global_batch.* 6 makes 3 microbatches.*{legal}"
    ):
        verify(scheduled(name, pipeline=4, microbatches=3))


@pytest.mark.parametrize(
    ("name", "partition"),
    [("zb-v", [1, 3, 1, 2]), ("interleaved", [2, 1, 1, 3]), ("zb-h1", [6, 1])],
)
def test_uneven_stages(name: str, partition: list[int]) -> None:
    changes = {"strategy.pipeline.partition": partition}
    assert_equal_to_one_device(verify(scheduled(name, layers=7, changes=changes)))


def test_three_chunks() -> None:
    assert_equal_to_one_device(verify(scheduled("interleaved", chunks=3, tied=True)))


def test_shared_key_value_heads_get_their_gradients_with_the_inputs() -> None:
    assert_equal_to_one_device(verify(scheduled("zb-h1", tensor=4, layers=2, biases="qkv")))


def test_a_schedule_without_a_pipeline_orders_nothing() -> None:
    assert_equal_to_one_device(verify(scheduled("zb-v", pipeline=1, data=2)))


def any_table(seed: int, ranks: int, stages: int, microbatches: int) -> Table:
    """Stages on any ranks, backwards split or not, all actions in some order in which they can
    run.
    """
    draw = random.Random(seed)
    placement = [*range(ranks), *(draw.randrange(ranks) for _ in range(stages - ranks))]
    draw.shuffle(placement)
    split = {(s, m): draw.random() < 0.6 for s in range(stages) for m in range(microbatches)}
    rows: list[list[Action]] = [[] for _ in range(ranks)]
    ready = [Action(0, "F", m) for m in range(microbatches)]
    while ready:
        action = ready.pop(draw.randrange(len(ready)))
        rows[placement[action.stage]].append(action)
        ready += _after(action, stages, split)
    return Table(tuple(map(tuple, rows)), stages, microbatches, tuple(placement))


def _after(action: Action, stages: int, split: dict[tuple[int, int], bool]) -> list[Action]:
    """What an action makes possible."""
    stage, m = action.stage, int(action.microbatch or 0)
    found = []
    if action.kind == "F":
        found.append(
            Action(stage + 1, "F", m)
            if stage < stages - 1
            else Action(stage, "I" if split[stage, m] else "B", m)
        )
    elif action.kind != "W" and stage:
        found.append(Action(stage - 1, "I" if split[stage - 1, m] else "B", m))
    return found + ([Action(stage, "W", m)] if action.kind == "I" else [])


def drawn(table: Table, folder: Path, **more: Any) -> Plan:
    """A plan that follows a table from its file."""
    path = folder / "table.csv"
    write_csv(table, path)
    return scheduled(
        str(path),
        pipeline=table.ranks,
        chunks=table.stages // table.ranks,
        layers=table.stages,
        microbatches=table.microbatches,
        **more,
    )


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("seed", range(4))
def test_any_valid_table(seed: int, tied: bool, tmp_path: Path) -> None:
    table = any_table(seed, ranks=2 + seed % 2, stages=2 * (2 + seed % 2), microbatches=3)
    assert validate(table) == []
    assert_equal_to_one_device(verify(drawn(table, tmp_path, tied=tied, data=2)))


def test_a_random_table_on_one_rank(tmp_path: Path) -> None:
    assert_equal_to_one_device(verify(drawn(any_table(7, 1, 3, 3), tmp_path, tied=True, data=2)))


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ("0F0,0B0,0F1,0B1\n1F1,1F0,1B1,1B0", "deadlocks: rank 0 at 0B0, rank 1 at 1F1"),
        ("0F0,0F1,0B0,0B1\n1F0,1F1,1B0", "1B1 is missing"),
        ("0F0,0F1,0I0,0B1,\n1F0,1F1,1B0,1B1", "0B0 is missing, or its half 0W0"),
        ("0F0,0F1,0B0,0B1,1B1\n1F0,1F1,1B0", "rank 0: 1B1 belongs to rank 1"),
        ("0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1,1B2", "rank 1: 1B2 is beyond the 2 microbatches"),
        (
            "0F0,0SEND_F0,0F1,0SEND_F1,0B0,0B1\n1RECV_F0,1F0,1RECV_F1,1F1,1B0,1B1",
            "0B0 has no 0RECV_B0",
        ),
    ],
)
def test_a_broken_table_is_refused_with_its_place(rows: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "broken.csv"
    path.write_text(rows)
    with pytest.raises(PlanError, match=rf"strategy\.pipeline\.schedule: .*{said}"):
        scheduled(str(path), chunks=1, microbatches=2).resolve()


@pytest.mark.parametrize("name", ["1f1b", "eager-1f1b", *SPLIT_OR_CHUNKED])
def test_evaluation_with_several_stages_a_rank(name: str) -> None:
    found = scheduled(name, tied=True).resolve()
    text = torch.randint(257, (8, 17), generator=torch.Generator().manual_seed(0))
    model = Transformer(found.shape).double()
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            parameter.copy_(verification_weight(path, tuple(parameter.shape), 0, torch.float64))
        expected = float(model(text[:, :-1], text[:, 1:]))
    losses = run_ranks(found.world_size, partial(_evaluate, found, text))
    assert [loss for loss in losses if loss is not None] == [pytest.approx(expected, rel=1e-12)]


def _evaluate(found: ResolvedPlan, text: torch.Tensor, rank: int) -> float | None:
    session = Session.build(found, build_mesh(found, rank), torch.device("cpu"), torch.float64)
    store = session.part.store
    for name, layout in store.layouts.items():
        store.values[name].copy_(
            layout.take(verification_weight(layout.name, layout.shape, 0, torch.float64))
        )
    tokens = text.unflatten(0, (4, 2))
    before = {name: gradient.clone() for name, gradient in store.gradients.items()}
    loss = session.evaluate(tokens[..., :-1], tokens[..., 1:])
    assert all(torch.equal(before[name], gradient) for name, gradient in store.gradients.items())
    return None if loss is None else float(loss)


@pytest.mark.parametrize("name", ["zb-h1", "zb-v"])
def test_bf16_split_gradients_accumulate_as_full_backwards_do(name: str) -> None:
    """Narrow gradients are widened into fp32 sums, microbatch by microbatch, in either half of a
    backward.
    """
    changes = {"strategy.precision": "bf16"}
    split, whole = (
        scheduled(name, changes=changes, shape=GPT),
        scheduled("1f1b", changes=changes, shape=GPT),
    )
    found, expected = (_gradients(each.resolve()) for each in (split, whole))
    assert found.keys() == expected.keys()
    for path, gradient in found.items():
        assert gradient.dtype == torch.float32 and torch.equal(gradient, expected[path]), path


def _gradients(found: ResolvedPlan) -> dict[str, torch.Tensor]:
    return {
        path: torch.from_numpy(x)
        for part in run_ranks(2, partial(_step, found))
        for path, x in part.items()
    }


def _step(found: ResolvedPlan, rank: int) -> dict[str, Any]:
    session = Session.build(found, build_mesh(found, rank), torch.device("cpu"))
    text = torch.randint(257, (4, 2, 17), generator=torch.Generator().manual_seed(0))
    session.part.store.zero_grads()
    session.executor.step(text[..., :-1], text[..., 1:], 1 / text.numel())
    return {name: gradient.numpy() for name, gradient in session.part.store.gradients.items()}
