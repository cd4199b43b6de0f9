"""A session's checkpoint loads on every other mesh, to the bit: heads that ranks share, padding and ties included."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.parallel.small import GPT, LLAMA, plan
from workbench.engine.forked import run_ranks
from workbench.engine.saving import Saver
from workbench.engine.session import Session
from workbench.parallel.mesh import build_mesh
from workbench.plan.schema import Plan

Whole = dict[tuple[str, str], np.ndarray]


def session_of(made: Plan, rank: int) -> Session:
    return Session.build(made, build_mesh(made, rank), torch.device("cpu"))


def save(made: Plan, folder: Path, rank: int) -> None:
    """Save after a step, so that moments are not zero."""
    session = session_of(made, rank)
    data = session.mesh["data"]
    shape = (data.size * made.num_microbatches, 2, made.training.sequence_length)
    text = torch.randint(257, shape, generator=torch.Generator().manual_seed(1)).chunk(data.size)[data.index]
    session.step(0, text, text.flip(-1))
    saver = Saver(session, folder)
    saver.save(1)
    saver.wait()


def load(made: Plan, rank: int) -> list[tuple[str, str, Any, np.ndarray]]:
    session = session_of(made, rank)
    saver = Saver(session, Path("unused"))
    assert saver.load() == 1
    return [(shard.name, shard.kind, shard.slices, shard.tensor.float().numpy()) for _, shard in saver._shards()]


@pytest.mark.parametrize("mesh, shape", [
    ((4, 1, 1), LLAMA), ((2, 2, 1), LLAMA), ((1, 2, 2), {**GPT, "tied": True}),
], ids=["shared heads", "tensor x pipeline", "tied, pipeline x data"])  # fmt: skip
def test_any_mesh_loads_what_another_saved(tmp_path: Path, mesh: tuple[int, int, int], shape: dict[str, Any]) -> None:
    batch = {"training.global_batch": 8}
    written = plan(*mesh, shape=shape, changes=batch).complete()
    run_ranks(written.world_size, partial(save, written, tmp_path))
    read = {"checkpoint.load": str(tmp_path / "checkpoints" / "step-00000001"), **batch}
    wholes: Whole = {
        (name, kind): tensor
        for name, kind, _, tensor in run_ranks(1, partial(load, plan(shape=shape, changes=read).complete()))[0]
    }
    assert any(np.abs(tensor).max() > 0 for (_, kind), tensor in wholes.items() if kind == "moment1")
    back = plan(4 if mesh[0] == 2 else 2, 1, 1, shape=shape, changes=read).complete()
    for rank, shards in enumerate(run_ranks(back.world_size, partial(load, back))):
        for name, kind, slices, tensor in shards:
            expected = wholes[name, kind][tuple(slice(*s) for s in slices)]
            assert np.array_equal(tensor, expected), (rank, name, kind)


STAGES: list[tuple[tuple[int, int, int], dict[str, Any]]] = [
    ((1, 1, 2), {"zero": 1}),
    ((1, 1, 4), {"zero": 2, "reduce": "microbatch", "shard": 2}),
    ((1, 2, 2), {"zero": 3, "offload": "parameters"}),
    ((2, 1, 2), {"zero": 2, "offload": "optimizer"}),
    ((1, 1, 2), {"zero": 3, "reduce": "microbatch"}),
]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("index", range(len(STAGES)))
def test_any_stage_of_zero_loads_what_another_saved(tmp_path: Path, index: int, precision: str) -> None:
    def staged(case: tuple[tuple[int, int, int], dict[str, Any]], **more: Any) -> Plan:
        mesh, data = case
        changes = {f"strategy.data.{key}": value for key, value in data.items()} | more
        changes |= {"strategy.precision": precision, "training.global_batch": 8}
        return plan(*mesh, shape={**GPT, "tied": True}, changes=changes).complete()

    written = staged(STAGES[index])
    run_ranks(written.world_size, partial(save, written, tmp_path))
    read = {"checkpoint.load": str(tmp_path / "checkpoints" / "step-00000001")}
    wholes = {(n, kind): x for n, kind, _, x in run_ranks(1, partial(load, staged(((1, 1, 1), {}), **read)))[0]}
    assert any(np.abs(x).max() > 0 for (_, kind), x in wholes.items() if kind == "moment1")
    back = staged(STAGES[index - 1], **read)
    held = 0
    for rank, shards in enumerate(run_ranks(back.world_size, partial(load, back))):
        for name, kind, slices, tensor in shards:
            assert np.array_equal(tensor, wholes[name, kind][tuple(slice(*s) for s in slices)]), (rank, name, kind)
            held += tensor.size
    assert held >= sum(x.size for x in wholes.values())
