"""A bit flip on one replica is named before a checkpoint is written."""

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import dtype

from tests.checkpoint.test_session_checkpoint import session_of
from tests.parallel.small import GPT, plan
from workbench.engine.session_checkpoint import SessionCheckpointer
from workbench.engine.verify.forked_ranks import run_ranks
from workbench.engine.verify.replica_check import (
    CHUNK_ENTRIES,
    INTEGER_OF_BYTES,
    ReplicasDiffer,
    bit_checksum,
)
from workbench.plan.schema import Plan

NAME = "blocks.1.attention.o.weight"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.float16])
def test_every_flipped_bit_changes_the_sum(dtype: dtype) -> None:
    tensor = torch.randn(37).to(dtype)
    before, size = bit_checksum(tensor), 8 * dtype.itemsize
    for bit in range(size):
        flipped = tensor.clone()
        mask = 1 << bit if bit < size - 1 else -(1 << bit)
        flipped.view(INTEGER_OF_BYTES[dtype.itemsize])[11] ^= mask
        assert bit_checksum(flipped) != before


def test_the_sum_is_that_of_its_pieces() -> None:
    tensor = torch.randn(2 * CHUNK_ENTRIES + 5)
    pieces = [bit_checksum(piece.clone()) for piece in tensor.split(CHUNK_ENTRIES)]
    assert bit_checksum(tensor) == sum(pieces) and bit_checksum(tensor[:0]) == 0


def test_the_sum_knows_no_place_in_memory() -> None:
    tensor = torch.randn(40)
    assert (
        bit_checksum(tensor[3:]) == bit_checksum(tensor[3:].clone()) != bit_checksum(tensor[2:39])
    )


def saved(made: Plan, folder: Path, flip: int | None, rank: int) -> str:
    """What saving says on a rank, after rank `flip` has had a bit flipped."""
    session = session_of(made, rank)
    if rank == flip:
        name = next(
            name for name, layout in session.part.store.layouts.items() if layout.name == NAME
        )
        session.part.store.values[name].view(torch.int32).view(-1)[3] ^= 1 << 7
    saver = SessionCheckpointer(session, folder)
    try:
        saver.save(5)
        saver.wait()
    except ReplicasDiffer as error:
        assert not isinstance(error, ValueError)  # which the loop takes for a disk's, and trains on
        return str(error)
    return ""


@pytest.mark.parametrize(
    "data, flip, words",
    [(3, 1, "differs on rank 1 from that of the others"), (2, 1, "differs among ranks 0, 1")],
)
def test_a_replica_with_another_bit_is_named_and_not_saved(
    tmp_path: Path, data: int, flip: int, words: str
) -> None:
    made = plan(data=data, shape=GPT, changes={"training.global_batch": 12}).resolve()
    for told in run_ranks(data, partial(saved, made, tmp_path, flip)):
        assert told.startswith(f"after 5 steps parameter of {NAME}") and words in told
    assert not list((tmp_path / "checkpoints").glob("step-*"))


def test_what_an_operator_strategy_replicates_is_compared(tmp_path: Path) -> None:
    row = {"strategy.operators": {"blocks.*.mlp.down": "((1,2),(2,1))"}}
    made = plan(tensor=2, shape=GPT, changes=row).resolve()
    assert run_ranks(2, partial(saved, made, tmp_path, None)) == ["", ""]
    for told in run_ranks(2, partial(saved, made, tmp_path / "flipped", 1)):
        assert told.startswith(f"after 5 steps parameter of {NAME} differs among ranks 0, 1")


def test_equal_replicas_are_saved(tmp_path: Path) -> None:
    made = plan(data=2, shape=GPT).resolve()
    assert run_ranks(2, partial(saved, made, tmp_path, None)) == ["", ""]
    assert (tmp_path / "checkpoints" / "step-00000005").is_dir()
