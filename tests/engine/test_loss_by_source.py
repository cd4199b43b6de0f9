"""A step says the training loss of each source of a mixture, the same on every mesh."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.parallel.small import plan
from tests.parallel.test_context import context_plan
from workbench.engine.session import Session
from workbench.engine.source_losses import SequenceSources
from workbench.engine.verify.drawn_batches import random_batches
from workbench.engine.verify.forked_ranks import run_ranks
from workbench.engine.verify.single_device import CPU, trained_tokens
from workbench.kernels import cross_entropy, linear_cross_entropy
from workbench.models.seams import IGNORE_INDEX, token_losses_observed
from workbench.parallel.mesh import build_mesh
from workbench.plan.schema import Plan
from workbench.profile import Profile
from workbench.runs.store.telemetry_frames import RECENT_STEPS, MeasuredFrames

NUM_SOURCES = 3
CHANGES: dict[str, Any] = {
    "training.micro_batch": 2,
    "training.global_batch": 8,
    "corpus.separate_documents": True,
}
MESHES: dict[str, Plan] = {
    "one sequence at once": plan(data=2, changes={**CHANGES, "training.micro_batch": 1}),
    "data": plan(data=2, changes=CHANGES),
    "tensor and pipeline": plan(2, 2, changes=CHANGES),
    "ring": context_plan(2, "ring", changes=CHANGES),
}


def source_of(sample: int) -> int:
    """Two of three have samples."""
    return 0 if sample % 3 == 0 else 2


def stepped(made: Plan, rank: int) -> tuple[list[float], float]:
    full = made.resolve()
    session = Session.build(full, build_mesh(full, rank), CPU)
    tokens, targets, _ = next(random_batches(full))
    samples = torch.tensor(session.share.samples())
    sources = [[source_of(int(i)) for i in row] for row in samples]
    result = session.step(
        0,
        tokens[samples],
        targets[samples],
        trained_tokens=trained_tokens(targets),
        sources=SequenceSources(sources, NUM_SOURCES),
    )
    assert result.parts is not None
    return result.parts.tolist(), result.loss.item()


def expected() -> list[float]:
    """Each source's samples evaluated alone on one device, by the loss of all tokens."""
    full = plan(changes={**CHANGES, "training.micro_batch": 1}).resolve()
    session = Session.build(full, build_mesh(full, 0), CPU)
    tokens, targets, _ = next(random_batches(full))
    sums = [0.0] * NUM_SOURCES
    for sample in range(len(tokens)):
        one = torch.tensor([[sample]] * full.num_microbatches)
        loss = session.evaluate(tokens[one], targets[one])
        assert loss is not None
        sums[source_of(sample)] += loss.item() / full.num_microbatches
    return [each / trained_tokens(targets) for each in sums]


@pytest.mark.parametrize("mesh", MESHES)
def test_losses_by_source_are_those_of_one_device(mesh: str) -> None:
    made = MESHES[mesh]
    found = run_ranks(made.resolve().world_size, lambda rank: stepped(made, rank), seconds=60)
    right = expected()
    assert right[1] == 0
    for by_source, loss in found:
        assert by_source == pytest.approx(right, rel=1e-5)
        assert sum(by_source) == pytest.approx(loss, rel=1e-6)


def measured(steps: int) -> Profile:
    """Source a has a loss of 1 in the steps that are not averaged, then 2 of 10 and 4 of 30."""
    found = MeasuredFrames("run", 1)
    for step in range(steps):
        recent = step - (steps - RECENT_STEPS)
        loss, tokens = (1.0, 10) if recent < 0 else (2.0, 10) if recent % 2 else (4.0, 30)
        rows = [{"source": "a", "loss": loss, "tokens": tokens}]
        rows += [{"source": "b", "loss": 0.5, "tokens": 1}] * (recent == 5)
        step_record = dict.fromkeys(("loss", "seconds", "bytes", "data_seconds", "tokens"))
        found.add([{"kind": "step", "rank": 0, "step": step, **step_record, "by_source": rows}])
    return found.profile()


def test_a_run_says_the_mean_over_the_tokens_of_its_last_steps() -> None:
    found = measured(2 * RECENT_STEPS).summary()["loss_by_source"]
    assert found == [
        {"source": "a", "loss": 3.5, "tokens": 20 * RECENT_STEPS},
        {"source": "b", "loss": 0.5, "tokens": 1},
    ]


@pytest.mark.slow
def test_a_loss_in_chunks_shows_each_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_cross_entropy, "loss_chunk_tokens", lambda *_: 3)
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(rows, 4, generator=generator) for rows in (8, 7))
    targets = torch.randint(7, (8,), generator=generator)
    targets[5] = IGNORE_INDEX
    seen: list[torch.Tensor] = []
    with token_losses_observed(seen.append):
        linear_cross_entropy.linear_cross_entropy(x, weight, targets, kernels="eager")
        cross_entropy.cross_entropy(x @ weight.T * 1, targets, kernels="eager")
    expected = F.cross_entropy(x @ weight.T, targets, reduction="none", ignore_index=IGNORE_INDEX)
    assert [len(each) for each in seen] == [3, 3, 2, 8]
    torch.testing.assert_close(torch.cat(seen), expected.repeat(2))
