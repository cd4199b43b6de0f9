"""Dropout draws on every mesh what one device draws; its hash is even and independent."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.parallel.small import GPT, LLAMA, plan
from tests.parallel.test_equality import assert_equal_to_one_device
from tests.parallel.test_mutations import failure_of
from workbench.engine.verify.drawn_batches import random_batches
from workbench.engine.verify.equivalence import verify
from workbench.engine.verify.single_device import train_on_one_device
from workbench.errors import PlanError
from workbench.models import Transformer
from workbench.models.counter_dropout import Dropout, SampleIndices, apply_dropout, keep_mask
from workbench.models.counter_hash import row_keys
from workbench.models.seams import Positions
from workbench.models.weight_init import seed_of
from workbench.parallel import activation_checkpointing
from workbench.parallel.mesh import MeshAxis
from workbench.parallel.tensor import apply_tensor as tensor_apply
from workbench.plan.schema import Plan

RATE = 0.2
SEQUENCE = {"strategy.tensor.sequence": True}
CONTEXT = {"strategy.context.size": 2, "training.global_batch": 4}
FULL = {"strategy.recompute": "full"}


def dropping(
    *mesh: int, changes: dict[str, Any] | None = None, shape: dict[str, Any] = LLAMA, **more: Any
) -> Plan:
    return plan(
        *mesh,
        shape=shape,
        layers=2,
        microbatches=2,
        changes={"training.dropout": RATE, **(changes or {})},
        **more,
    )


@pytest.mark.parametrize(
    "mesh, changes",
    [
        ((1, 1, 1), {}),
        ((2, 1, 1), {}),
        ((2, 1, 1), SEQUENCE),
        ((1, 2, 1), {}),
        ((1, 1, 2), {}),
        ((1, 1, 2), CONTEXT),
        ((1, 1, 2), CONTEXT | {"strategy.context.algorithm": "ulysses"}),
        ((1, 1, 1), FULL),
        ((2, 2, 1), SEQUENCE | FULL),
        ((2, 1, 2), SEQUENCE | CONTEXT),
        ((1, 2, 2), {"strategy.data.zero": 1} | FULL),
        ((1, 1, 2), {"strategy.data.zero": 3} | FULL),
    ],
    ids=str,
)
def test_every_mesh_equals_one_device(mesh: tuple[int, int, int], changes: dict[str, Any]) -> None:
    assert_equal_to_one_device(verify(dropping(*mesh, changes=changes), "fp64"))


@pytest.mark.parametrize("mesh, changes", [((2, 1, 1), SEQUENCE), ((1, 2, 1), FULL)], ids=str)
def test_gpt_style(mesh: tuple[int, int, int], changes: dict[str, Any]) -> None:
    made = dropping(*mesh, changes=changes, shape=GPT, tied=True, embedding_norm=True)
    assert_equal_to_one_device(verify(made, "fp64"))


def test_it_changes_the_loss_of_every_step_of_training() -> None:
    """One device, the same tokens twice: with dropout two steps differ, from each other and from
    none.
    """
    made = dropping().resolve()
    batch = next(random_batches(made))
    still = made.resolve().with_fields(**{"training.optimizer.learning_rate": 1e-30})
    first, second = train_on_one_device(still, [batch] * 2, torch.float64).losses
    plain, again = train_on_one_device(
        still.with_fields(**{"training.dropout": 0.0}), [batch] * 2, torch.float64
    ).losses
    assert plain == again and len({first, second, plain}) == 3


def test_tokens_of_all_tensor_ranks_dropped_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    def first_run(axis: MeshAxis, x_BT: Tensor) -> Tensor:
        return x_BT.flatten().chunk(axis.size)[0].view(x_BT.shape[0], -1)

    monkeypatch.setattr(tensor_apply, "local_run", first_run)
    assert failure_of(verify(dropping(2, changes=SEQUENCE)))["tensor"]


def test_another_dropout_mask_when_recomputed_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def block(
        forward: Any, offload: None, x: Tensor, residual: Tensor | None, positions: Positions
    ) -> Any:
        runs: list[int] = []

        def drifting(total: Tensor, none: None, positions: Positions) -> Any:
            assert positions.rows is not None
            runs.append(1)
            return forward(total, none, positions._replace(rows=positions.rows + len(runs) - 1))

        return activation_checkpointing._checkpoint(
            drifting, x if residual is None else x + residual, None, positions
        )

    monkeypatch.setattr(activation_checkpointing, "_checkpointed_block", block)
    answer = verify(dropping(changes=FULL))
    assert failure_of(answer)["kind"] != "loss"
    assert answer["max_relative_diff"]["gradients"] > 0.01


@pytest.mark.parametrize("forgotten", ["step", "microbatch", "data rank", "place"])
def test_a_dropout_key_without_one_of_its_parts_is_found(
    monkeypatch: pytest.MonkeyPatch, forgotten: str
) -> None:
    """The reference takes whole batches, so that a fault planted for micro-batches does not reach
    it.
    """
    start, rows = SampleIndices.start_step, SampleIndices.rows
    mesh, changes = (
        ((1, 1, 2), CONTEXT)
        if forgotten == "place"
        else ((1, 1, 2 if forgotten == "data rank" else 1), {})
    )
    made = dropping(*mesh, changes=changes)
    batch, own = made.training.global_batch, made.training.micro_batch

    def forgetful(self: SampleIndices, first: int, micro_batch: int) -> None:
        mine = micro_batch == own
        first = first % batch if mine and forgotten == "step" else first
        first = first - first % batch if mine and forgotten == "data rank" else first
        start(self, first, 0 if mine and forgotten == "microbatch" else micro_batch)

    def in_order(self: SampleIndices, count: int, indices: Tensor) -> Tensor:
        return rows(self, count, torch.arange(len(indices)) if forgotten == "place" else indices)

    monkeypatch.setattr(SampleIndices, "start_step", forgetful)
    monkeypatch.setattr(SampleIndices, "rows", in_order)
    answer = verify(made)
    assert failure_of(answer)["tensor"]
    assert (answer["max_relative_diff"]["gradients"] < 1e-9) == (forgotten == "step"), (
        "the first step is right"
    )


def mask(
    rows: Tensor,
    name: str = "blocks.0.mlp.dropout",
    seed: int = 0,
    channels: int = 64,
    rate: float = RATE,
) -> Tensor:
    return keep_mask(row_keys(rows.flatten(), seed_of(name, seed)), channels, rate)


def rows_of(first: int, batch: int, length: int) -> Tensor:
    samples = SampleIndices()
    samples.start_step(first, batch)
    return samples.rows(batch, torch.arange(length))


def test_the_hash_is_that_of_unsigned_arithmetic() -> None:
    """Written once more with numpy's unsigned integers, which define what wraps."""
    rows = rows_of(2**30, 3, 50).flatten()
    key = seed_of("blocks.1.attention.dropout", 7)
    with np.errstate(over="ignore"):
        z = rows.numpy().astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
        first, second = (
            (z & np.uint64(2**32 - 1)).astype(np.uint32),
            (z >> np.uint64(32)).astype(np.uint32),
        )
        x = np.arange(300, dtype=np.uint32) * np.uint32(0x9E3779B9) + first[:, None]
        x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D) ^ second[:, None]
        x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
        x = x ^ (x >> np.uint32(16))
    # Signed bits are ordered as unsigned ones with the highest turned.
    expected = (x ^ np.uint32(2**31)) >= np.uint32(round(0.3 * 2**32))
    assert np.array_equal(mask(rows, "blocks.1.attention.dropout", 7, 300, 0.3).numpy(), expected)


@pytest.mark.parametrize("rate", [0.001, 0.1, 0.5, 0.9])
def test_the_fraction_of_dropped_choices(rate: float) -> None:
    found = mask(rows_of(5, 16, 128), channels=512, rate=rate).double()
    for means, count in (
        (found.mean(), found.numel()),
        (found.mean(0), len(found)),
        (found.mean(1), 512),
    ):
        deviation = (rate * (1 - rate) / count) ** 0.5
        assert (means - (1 - rate)).abs().max() < 5.5 * deviation


@pytest.mark.parametrize(
    "other",
    ["step", "sample", "token", "channel", "two channels", "module", "seed", "keys swapped"],
)
def test_masks_are_independent(other: str) -> None:
    """Correlation of two masks of 2^19 entries, in deviations of what independent ones would
    have.
    """
    rows = rows_of(64, 8, 256)
    base = mask(rows, channels=256)
    second = {
        "step": lambda: mask(rows + (8 << 32), channels=256),
        "sample": lambda: mask(rows + (1 << 32), channels=256),
        "token": lambda: mask(rows + 1, channels=256),
        "channel": lambda: base.roll(1, 1),
        "two channels": lambda: base.roll(1, 1) ^ base.roll(2, 1),
        "module": lambda: mask(rows, "blocks.0.attention.dropout", channels=256),
        "seed": lambda: mask(rows, seed=1, channels=256),
        "keys swapped": lambda: keep_mask(
            row_keys(rows.flatten(), seed_of("blocks.0.mlp.dropout", 0)).flip(1), 256, RATE
        ),
    }[other]()
    both = torch.stack((base, second)).flatten(1).double()
    assert abs(float(torch.corrcoef(both)[0, 1])) * both.shape[1] ** 0.5 < 5


def test_backward_draws_the_mask_of_forward() -> None:
    x, rows = torch.randn(2, 5, 33, dtype=torch.float64, requires_grad=True), rows_of(3, 2, 5)
    module = Dropout(RATE, 17)
    y = module(x, rows)
    stays = keep_mask(row_keys(rows.flatten(), 17), 33, RATE).view(x.shape)
    assert torch.equal(y, x * stays * (1 / (1 - RATE))) and 0 < int(stays.sum()) < x.numel()
    gradient = torch.randn_like(y)
    y.backward(gradient)
    assert x.grad is not None and torch.equal(x.grad, gradient * stays * (1 / (1 - RATE)))


def test_masks_do_not_depend_on_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    x, rows = torch.randn(3, 7, 10), rows_of(0, 3, 7)
    whole = apply_dropout(x, rows, 5, RATE)
    monkeypatch.setattr("workbench.models.counter_dropout.DROPOUT_CHUNK_NUMEL", 40)
    assert torch.equal(apply_dropout(x, rows, 5, RATE), whole)


def test_nothing_is_dropped_in_evaluation() -> None:
    model = Transformer(dropping().resolve().shape, RATE).eval()
    assert model.positions(torch.zeros(1, 4, dtype=torch.long)).rows is None
    x = torch.randn(1, 4, 8)
    assert Dropout(RATE, 0).eval()(x, None) is x


def test_dropout_reads_no_value_on_the_host() -> None:
    with FakeTensorMode():
        x = torch.empty(2, 3, 8, dtype=torch.bfloat16)
        assert apply_dropout(x, rows_of(0, 2, 3), 1, RATE).dtype == torch.bfloat16


@pytest.mark.parametrize("rate", [-0.1, 1.0])
def test_a_rate_that_is_none_is_refused(rate: float) -> None:
    with pytest.raises(PlanError, match=r"training\.dropout"):
        dropping(changes={"training.dropout": rate})
