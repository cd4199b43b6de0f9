"""torch's own pipelining runtime as the oracle: it runs the same table on the same stages to the
same gradients.
"""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    ScheduleInterleavedZeroBubble,
    _PipelineScheduleRuntime,
)

from tests.parallel.small import CHUNKS
from tests.parallel.test_pipeline import drawn, scheduled
from tests.schedules.test_against_torch import multi_stage_order, table_from
from workbench.engine.session import Session
from workbench.engine.verify.forked_ranks import run_ranks
from workbench.parallel.mesh import build_mesh
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.schedules import generate, write_csv


@pytest.mark.parametrize("name", ["interleaved", "zb-h1", "zb-v", "dualpipe-v"])
def test_named_schedules(name: str, tmp_path: Path) -> None:
    found = scheduled(name, microbatches=4).resolve()
    write_csv(generate(name, 2, 4, CHUNKS[name]), tmp_path / "theirs.csv")
    assert_same_gradients(found, tmp_path / "theirs.csv")


def test_a_table_that_no_generator_makes(tmp_path: Path) -> None:
    """torch's zero-bubble schedule of two chunks a rank."""
    order = multi_stage_order(ScheduleInterleavedZeroBubble, 2, 4, 2)
    found = drawn(table_from(order), tmp_path).resolve()
    assert_same_gradients(found, tmp_path / "table.csv")


def assert_same_gradients(found: ResolvedPlan, table: Path) -> None:
    for differences in run_ranks(2, partial(_compare, found, str(table))):
        assert differences and max(differences.values()) < 1e-12, differences


def _compare(found: ResolvedPlan, table: str, rank: int) -> dict[str, float]:
    """Name -> largest difference of a gradient from torch's, relative to its largest entry."""
    session = Session.build(found, build_mesh(found, rank), torch.device("cpu"), torch.float64)
    theirs = {stage: copy.deepcopy(model) for stage, model in session.part.stages.items()}
    shape = (found.num_microbatches, found.training.micro_batch, 17)
    text = torch.randint(257, shape, generator=torch.Generator().manual_seed(0))
    tokens, targets = text[..., :-1].contiguous(), text[..., 1:].contiguous()
    session.part.store.zero_grads()
    session.executor.step(tokens, targets, 1 / targets.numel())
    _torchs(session, theirs, table, tokens, targets)
    ours = session.part.store.gradients
    expected = {
        n: p.grad
        for model in theirs.values()
        for n, p in model.named_parameters()
        if p.grad is not None
    }
    assert ours.keys() == expected.keys()
    return {n: float((ours[n] - g).abs().max() / g.abs().max()) for n, g in expected.items()}


def _torchs(
    session: Session,
    stages: dict[int, torch.nn.Module],
    table: str,
    tokens: torch.Tensor,
    targets: torch.Tensor,
) -> None:
    axis, num = session.mesh["pipeline"], session.executor.table.stages
    for model in stages.values():
        for parameter in model.parameters():
            parameter.grad = None
    own = [
        PipelineStage(model, stage, num, torch.device("cpu"), group=axis.group)
        for stage, model in stages.items()
    ]
    scale = 1 / targets.numel()
    runtime = _PipelineScheduleRuntime(
        own, len(tokens), loss_fn=lambda loss, target: loss * scale, scale_grads=False
    )
    runtime._load_csv(table, format="compute_only")
    first = (tokens.flatten(0, 1),) if 0 in stages else ()
    runtime.step(
        *first, target=targets.flatten(0, 1), targets_BT=targets.flatten(0, 1), return_outputs=False
    )
