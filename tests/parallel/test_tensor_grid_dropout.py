"""Dropout on tensor grids: a block meets the entries of one device's masks that are its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.parallel.small import GPT
from tests.parallel.test_mutations import failure_of
from tests.parallel.test_tensor_grids import CUBE, DEEP, SQUARE, assert_equal, on
from workbench.engine.verify.equivalence import verify
from workbench.models import Transformer
from workbench.models.counter_dropout import SAMPLE_STRIDE, Dropout, SampleIndices, apply_dropout
from workbench.parallel.tensor.grid import apply_grid as grid_apply
from workbench.parallel.tensor.grid.apply_grid import local_token_ids, shard_dropout_masks
from workbench.plan.schema import Plan

RATE = 0.2
FULL = {"strategy.recompute": "full"}
CONTEXT = {"strategy.context.size": 2, "training.global_batch": 8}
SPLIT = {"strategy.pipeline.schedule": "zb-h1"}
FLAT = ("2.5d", [2, 2, 1])

Grid = tuple[str, list[int]]


def dropping(grid: Grid, *mesh: int, changes: dict[str, Any] | None = None, **more: Any) -> Plan:
    return on(grid, *mesh, layers=2, changes={"training.dropout": RATE, **(changes or {})}, **more)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("grid", "mesh", "changes"),
    [
        (SQUARE, (1, 1), {}),
        (FLAT, (1, 1), FULL),
        (DEEP, (1, 1), {}),
        (CUBE, (1, 1), FULL),
        (SQUARE, (2, 1), FULL),
        (SQUARE, (2, 1), SPLIT),
        (SQUARE, (1, 2), CONTEXT),
    ],
    ids=str,
)
def test_every_grid_equals_one_device(
    grid: Grid, mesh: tuple[int, int], changes: dict[str, Any]
) -> None:
    assert_equal(verify(dropping(grid, *mesh, changes=changes), "fp64"))


def test_gpt_style() -> None:
    assert_equal(verify(dropping(CUBE, shape=GPT, tied=True, embedding_norm=True), "fp64"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("grid", "planted"),
    [
        (SQUARE, lambda part, first: (part, 0)),
        (SQUARE, lambda part, first: ((0, part[1]), first)),
        (DEEP, lambda part, first: ((part[0] % 2, part[1]), first)),
        (CUBE, lambda part, first: ((part[0] % 2 * 2 + part[0] // 2, part[1]), first)),
    ],
    ids=["first column", "first row", "first layer", "another side"],
)
def test_dropout_with_the_mask_of_another_block_fails(
    monkeypatch: pytest.MonkeyPatch, grid: Grid, planted: Callable[..., Any]
) -> None:
    def wrong(model: Transformer, part: tuple[int, int], first: int) -> None:
        shard_dropout_masks(model, *planted(part, first))

    monkeypatch.setattr(grid_apply, "shard_dropout_masks", wrong)
    assert failure_of(verify(dropping(grid)))["tensor"]


def test_a_later_stage_that_takes_its_block_for_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    def counted_anew(part: tuple[int, int], whole: bool, rows_BT: Tensor) -> Tensor:
        return local_token_ids(part, whole, rows_BT) if whole else rows_BT

    monkeypatch.setattr(grid_apply, "local_token_ids", counted_anew)
    assert failure_of(verify(dropping(SQUARE, 2)))["tensor"].startswith("blocks.")


def test_blocks_have_the_masks_of_one_device() -> None:
    """Of 6 sequences, 5 tokens and 12 channels: the third pair of sequences, the last four
    channels.
    """
    samples = SampleIndices()
    samples.start_step(9, 6)
    rows = samples.rows(6, torch.arange(5))
    own = local_token_ids((2, 3), True, rows)
    assert torch.equal(own, rows[4:]) and torch.equal(local_token_ids((2, 3), False, rows[:2]), own)
    assert int(own[0, 0]) == 13 * SAMPLE_STRIDE
    x = torch.randn(6, 5, 12, dtype=torch.float64)
    module = Dropout(RATE, 17)
    module.first_channel = 8
    assert torch.equal(module(x[4:, :, 8:], own), apply_dropout(x, rows, 17, RATE)[4:, :, 8:])
