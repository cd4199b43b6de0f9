"""A session's checkpoint loads on every other mesh, to the bit: heads that ranks share, padding and
ties included.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from tests.parallel.small import GPT, LLAMA, plan
from workbench.checkpoint import background_writer, tensor_index, tensor_integrity
from workbench.checkpoint.checksums import file_sha256
from workbench.checkpoint.host_staging import start_copy_to_host
from workbench.checkpoint.safetensors_reader import SafetensorsFile
from workbench.copy_stream import CopyStream
from workbench.engine import session_checkpoint
from workbench.engine.session import Session, initial_drawer
from workbench.engine.session_checkpoint import SessionCheckpointer
from workbench.engine.verify.forked_ranks import RankError, run_ranks
from workbench.parallel.mesh import build_mesh
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.schema import Plan

UNEVEN = {**GPT, "heads": 6, "kv_heads": 3, "head_dim": 6, "ffn": 45}
"""Divided by neither two nor four tensor ranks."""
Whole = dict[tuple[str, str], np.ndarray]


def session_of(made: ResolvedPlan, rank: int) -> Session:
    """As a run builds it: before a checkpoint is loaded, nothing is drawn."""
    return Session.build(
        made, build_mesh(made, rank), torch.device("cpu"), drawer=initial_drawer(made)
    )


def save(made: ResolvedPlan, folder: Path, rank: int) -> None:
    """Save after a step, so that moments are not zero."""
    session = session_of(made, rank)
    data = session.mesh["data"]
    shape = (data.size * made.num_microbatches, 2, made.training.sequence_length)
    text = torch.randint(257, shape, generator=torch.Generator().manual_seed(1)).chunk(data.size)[
        data.index
    ]
    session.step(0, text, text.flip(-1))
    saver = SessionCheckpointer(session, folder)
    saver.save(1)
    saver.wait()


class LateCopies(CopyStream):
    """Copies that are made at the latest moment at which a GPU's could be: when an update of what
    is copied waits for them.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.made = threading.Event()
        self.copy: Callable[[], object] = lambda: None

    def copied(self) -> Callable[[], None]:
        return self.synchronize_now

    def synchronize_now(self) -> None:
        self.copy()
        self.made.set()

    def synchronize(self) -> None:
        if not self.made.wait(timeout=5):
            self.synchronize_now()


def test_an_update_waits_for_the_copies_of_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = plan(shape=LLAMA).resolve()
    session = session_of(made, 0)

    def copy_late(shards: Any, copies: LateCopies, former: Any) -> Any:
        into = start_copy_to_host(shards, CopyStream(session.device), former)
        for shard in into:
            shard.tensor.fill_(-1)
        copies.copy = lambda: [new.tensor.copy_(old.tensor) for new, old in zip(into, shards)]
        return into

    monkeypatch.setattr(session_checkpoint, "CopyStream", LateCopies)
    monkeypatch.setattr(background_writer, "start_copy_to_host", copy_late)
    shape = (made.num_microbatches, made.training.micro_batch, made.training.sequence_length)
    text = torch.randint(257, shape, generator=torch.Generator().manual_seed(1))
    session.step(0, text, text.flip(-1))
    saver = SessionCheckpointer(session, tmp_path)
    shards = [shard for _, shard in saver._shards() if shard.kind == "parameter"]
    expected = {shard.name: shard.tensor.clone() for shard in shards}
    path = saver.save(1)
    session.step(1, text, text.flip(-1))
    saver.wait()
    again = session_of(plan(shape=LLAMA, changes={"checkpoint.load": str(path)}).resolve(), 0)
    loader = SessionCheckpointer(again, Path("unused"))
    loader.load()
    for _, shard in loader._shards():
        if shard.kind == "parameter":
            assert torch.equal(shard.tensor, expected[shard.name])


def load(made: ResolvedPlan, rank: int) -> list[tuple[str, str, Any, np.ndarray]]:
    session = session_of(made, rank)
    saver = SessionCheckpointer(session, Path("unused"))
    assert saver.load() == 1
    return [
        (shard.name, shard.kind, shard.slices, shard.tensor.float().numpy())
        for _, shard in saver._shards()
    ]


@pytest.mark.parametrize(
    "mesh, shape",
    [
        ((4, 1, 1), LLAMA),
        ((2, 2, 1), LLAMA),
        ((1, 2, 2), {**GPT, "tied": True}),
        ((4, 1, 1), UNEVEN),
    ],
    ids=["shared heads", "tensor x pipeline", "tied, pipeline x data", "uneven heads"],
)
def test_any_mesh_loads_a_checkpoint_of_another(
    tmp_path: Path, mesh: tuple[int, int, int], shape: dict[str, Any]
) -> None:
    batch = {"training.global_batch": 8}
    written, alone = (plan(*at, shape=shape, changes=batch) for at in (mesh, (1, 1, 1)))
    back = plan(4 if mesh[0] == 2 else 2, 1, 1, shape=shape, changes=batch)
    assert_loads(tmp_path, written, alone, back)


COLUMNS = {
    "embedding.tokens": "((2,1),(1,))",
    "head": "((1,1),(1,2))",
    "blocks.*.attention.[qkv]": "((1,1),(1,2))",
    "blocks.*.attention.o": "((1,2),(2,1))",
}
"""Two ways; a tied weight alike in both places."""
GRID = COLUMNS | {"blocks.*.mlp.up": "((2,2),(2,1))", "blocks.*.mlp.down": "((1,4),(4,1))"}


@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 3])
def test_operators_load_a_checkpoint_of_other_operators(tmp_path: Path, zero: int) -> None:
    shape, changes = {**GPT, "tied": True}, {"training.global_batch": 8, "strategy.data.zero": zero}
    written = plan(2, 1, 2, shape=shape, changes=changes | {"strategy.operators": COLUMNS})
    back = plan(4, 1, 1, shape=shape, changes=changes | {"strategy.operators": GRID})
    assert_loads(tmp_path, written, plan(shape=shape, changes=changes), back)


def assert_loads(tmp_path: Path, saved: Plan, alone: Plan, back: Plan) -> None:
    """A checkpoint of one plan gives the ranks of another what it gives one device."""
    written = saved.resolve()
    run_ranks(written.world_size, partial(save, written, tmp_path))
    read = {"checkpoint.load": str(tmp_path / "checkpoints" / "step-00000001")}
    device, others = (each.replace(**read).resolve() for each in (alone, back))
    wholes: Whole = {
        (name, kind): tensor for name, kind, _, tensor in run_ranks(1, partial(load, device))[0]
    }
    assert any(
        np.abs(tensor).max() > 0 for (_, kind), tensor in wholes.items() if kind == "moment1"
    )
    for rank, shards in enumerate(run_ranks(others.world_size, partial(load, others))):
        for name, kind, slices, tensor in shards:
            expected = wholes[name, kind][tuple(slice(*s) for s in slices)]
            assert np.array_equal(tensor, expected), (rank, name, kind)


STAGES: list[tuple[tuple[int, int, int], dict[str, Any]]] = [
    ((1, 1, 2), {"zero": 1}),
    ((1, 1, 4), {"zero": 2, "reduce": "microbatch", "shard": 2}),
    ((1, 2, 2), {"zero": 3, "offload": "parameters"}),
    ((2, 1, 2), {"zero": 2, "offload": "optimizer"}),
    ((1, 1, 2), {"zero": 3, "reduce": "microbatch"}),
    ((1, 1, 2), {"zero": 3, "tile_factor": 4}),
]


@pytest.mark.slow
@pytest.mark.drawn(6)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("index", range(len(STAGES)))
def test_any_zero_stage_loads_a_checkpoint_of_another(
    tmp_path: Path, index: int, precision: str
) -> None:
    def staged(case: tuple[tuple[int, int, int], dict[str, Any]], **more: Any) -> ResolvedPlan:
        mesh, data = case
        changes = {f"strategy.data.{key}": value for key, value in data.items()} | more
        changes |= {"strategy.precision": precision, "training.global_batch": 8}
        return plan(*mesh, shape={**GPT, "tied": True}, changes=changes).resolve()

    written = staged(STAGES[index])
    run_ranks(written.world_size, partial(save, written, tmp_path))
    read = {"checkpoint.load": str(tmp_path / "checkpoints" / "step-00000001")}
    wholes = {
        (n, kind): x
        for n, kind, _, x in run_ranks(1, partial(load, staged(((1, 1, 1), {}), **read)))[0]
    }
    assert any(np.abs(x).max() > 0 for (_, kind), x in wholes.items() if kind == "moment1")
    back = staged(STAGES[index - 1], **read)
    held = 0
    for rank, shards in enumerate(run_ranks(back.world_size, partial(load, back))):
        for name, kind, slices, tensor in shards:
            assert np.array_equal(tensor, wholes[name, kind][tuple(slice(*s) for s in slices)]), (
                rank,
                name,
                kind,
            )
            held += tensor.size
    assert held >= sum(x.size for x in wholes.values())


@pytest.mark.parametrize(
    "written, read, words",
    [
        ({}, {"training.optimizer.moments": "bf16"}, r"moment1 of .* is F32, the plan needs BF16"),
        (
            {},
            {"training.optimizer.beta1": 0.0},
            r"holds moment1 of its parameters, which the plan has not",
        ),
        ({"training.optimizer.beta1": 0.0}, {}, r"has no moment1 of"),
    ],
)
def test_another_optimizer_state_is_refused_on_every_rank(
    tmp_path: Path, written: dict[str, Any], read: dict[str, Any], words: str
) -> None:
    batch = {"training.global_batch": 8, "training.optimizer.name": "sgd"}
    run_ranks(1, partial(save, plan(changes=batch | written).resolve(), tmp_path))
    at = {
        "checkpoint.load": str(tmp_path / "checkpoints" / "step-00000001"),
        "strategy.data.zero": 1,
    }
    made = plan(1, 1, 2, changes=batch | at | read).resolve()

    def refused(rank: int) -> str:
        with pytest.raises(
            ValueError, match=r"strategy\.precision and training\.optimizer"
        ) as error:
            load(made, rank)
        return str(error.value)

    first, second = run_ranks(2, refused)
    assert first == second and re.search(words, first)


def through(made: ResolvedPlan, folder: Path, rank: int) -> list[tuple[str, str, Any, np.ndarray]]:
    """What a rank holds once it has loaded, and has saved that again."""
    saver = SessionCheckpointer(session_of(made, rank), folder)
    assert saver.load() == 1
    held = [
        (shard.name, shard.kind, shard.slices, shard.tensor.float().numpy())
        for _, shard in saver._shards()
    ]
    saver.save(1)
    saver.wait()
    return held


DENSE = [
    {
        "cluster.gpus": 4,
        "strategy.tensor.size": [2, 2],
        "strategy.tensor.algorithm": "2d",
        "training.micro_batch": 4,
    },
    {
        "cluster.gpus": 4,
        "strategy.pipeline": {"size": 2, "schedule": "interleaved", "chunks": 2},
        "strategy.data.zero": 3,
    },
    {
        "cluster.gpus": 8,
        "strategy.tensor.size": [2, 2, 2],
        "strategy.tensor.algorithm": "3d",
        "training.micro_batch": 4,
    },
    {
        "cluster.gpus": 4,
        "strategy.context": {"size": 2, "algorithm": "ring"},
        "strategy.data.zero": 1,
    },
    {"cluster.gpus": 4, "strategy.tensor": {"size": 2, "sequence": True}, "strategy.data.zero": 2},
    {"cluster.gpus": 2, "strategy.pipeline": {"size": 2, "schedule": "dualpipe-v", "chunks": 2}},
]
MOE = [
    {"cluster.gpus": 4, "strategy.expert.size": 2, "strategy.data.zero": 3},
    {"cluster.gpus": 4, "strategy.expert.size": 2, "strategy.tensor.size": 2},
    {"cluster.gpus": 4, "strategy.expert.size": 4, "strategy.data.zero": 1},
    {
        "cluster.gpus": 4,
        "strategy.expert.size": 2,
        "strategy.pipeline.size": 2,
        "strategy.data.zero": 2,
    },
]
EXPERTS = {**LLAMA, "moe": {"experts": 4, "top_k": 2, "ffn": 24, "shared": 1, "first_dense": 1}}


@pytest.mark.parametrize(
    "shape, cases", [({**LLAMA, "tied": True}, DENSE), (EXPERTS, MOE)], ids=["dense", "experts"]
)
def test_a_state_goes_through_every_kind_of_plan_unchanged(
    tmp_path: Path, shape: dict[str, Any], cases: list[dict[str, Any]]
) -> None:
    batch = {"training.global_batch": 8}
    first = plan(shape=shape, changes=batch).resolve()
    run_ranks(1, partial(save, first, tmp_path))
    at = str(tmp_path / "checkpoints" / "step-00000001")
    ((*held,),) = run_ranks(1, partial(load, first.with_fields(**{"checkpoint.load": at})))
    wholes = {(name, kind): tensor for name, kind, _, tensor in held}
    for index, case in enumerate(cases):
        made = plan(shape=shape, changes=batch | case | {"checkpoint.load": at}).resolve()
        folder = tmp_path / str(index)
        for rank, shards in enumerate(run_ranks(made.world_size, partial(through, made, folder))):
            for name, kind, slices, tensor in shards:
                expected = wholes[name, kind][tuple(slice(*s) for s in slices)]
                assert np.array_equal(tensor, expected), (case, rank, name, kind)
        at = str(folder / "checkpoints" / "step-00000001")
    ((*back,),) = run_ranks(1, partial(load, first.with_fields(**{"checkpoint.load": at})))
    assert len(back) == len(wholes)
    assert all(np.array_equal(tensor, wholes[name, kind]) for name, kind, _, tensor in back)


class Counted(SafetensorsFile):
    """An open file that notes how many values are read of it."""

    read: ClassVar[list[int]] = []

    def get_slice(self, key: str) -> Any:
        view = super().get_slice(key)

        class Slice:
            def __getitem__(self, at: Any) -> torch.Tensor:
                part = view[at]
                Counted.read.append(part.numel() if at else 0)  # step counts aside
                return part

            def get_shape(self) -> list[int]:
                return view.get_shape()

        return Slice()


def sharded(folder: Path, **more: Any) -> ResolvedPlan:
    """A checkpoint of two tensor ranks, and a plan of ZeRO-3 over four that starts from it."""
    batch = {"training.global_batch": 8}
    run_ranks(2, partial(save, plan(2, 1, 1, changes=batch).resolve(), folder))
    at = {"checkpoint.load": str(folder / "checkpoints" / "step-00000001"), "strategy.data.zero": 3}
    return plan(1, 1, 4, changes=batch | at | more).resolve()


def test_a_rank_reads_only_its_own_boxes_and_files_are_verified_once(tmp_path: Path) -> None:
    made = sharded(tmp_path)

    def watched(rank: int) -> tuple[list[int], list[str], int]:
        hashed: list[str] = []
        digest = file_sha256
        readers: Any = tensor_index
        source_of = readers.checkpoint_source
        readers.checkpoint_source = lambda folder: replace(source_of(folder), opened=Counted)
        integrity: Any = tensor_integrity

        def counted_sha256(path: Path, *rest: Any) -> str:
            hashed.append(path.name)
            return digest(path, *rest)

        integrity.file_sha256 = counted_sha256
        held = load(made, rank)
        return (
            Counted.read,
            hashed,
            sum(tensor.size for _, kind, _, tensor in held if kind != "step"),
        )

    found = run_ranks(4, watched)
    for read, _, held in found:
        assert sum(read) == held and held < 0.3 * sum(each for _, _, each in found)
    hashed = [file for _, files, _ in found for file in files]
    assert sorted(hashed) == ["rank00000.safetensors", "rank00001.safetensors"]


def test_a_rank_killed_while_it_loads_ends_all(tmp_path: Path) -> None:
    made = sharded(tmp_path)

    def killed(rank: int) -> None:
        def read(*_: object) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        if rank == 2:
            reader: Any = Counted
            reader.get_slice = read
            readers: Any = tensor_index
            source_of = readers.checkpoint_source
            readers.checkpoint_source = lambda folder: replace(source_of(folder), opened=Counted)
        load(made, rank)

    before = multiprocessing.active_children()
    # Either the rank itself, or one whose peer is gone; not the time limit.
    with pytest.raises(RankError, match=r"rank 2|closed|reset|peer"):
        run_ranks(4, killed, seconds=60)
    assert multiprocessing.active_children() == before


def test_damage_found_by_one_rank_is_raised_on_all(tmp_path: Path) -> None:
    made = sharded(tmp_path)
    file = tmp_path / "checkpoints" / "step-00000001" / "rank00001.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 4
    file.write_bytes(data)

    def refused(rank: int) -> str:
        with pytest.raises(ValueError, match="is damaged") as error:
            load(made, rank)
        return str(error.value)

    said = set(run_ranks(4, refused))
    assert len(said) == 1 and str(file) in said.pop()
