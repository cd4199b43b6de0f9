"""Direct preference optimization equals one device under every strategy, and its paper there."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.parallel.small import GPT, plan
from tests.parallel.test_context import context_plan
from tests.parallel.test_equality import assert_equal_to_one_device
from tests.parallel.test_expert import moe_plan
from tests.parallel.test_pipeline import scheduled
from workbench.engine.session import Session
from workbench.engine.verify.drawn_batches import random_batches
from workbench.engine.verify.equivalence import verify
from workbench.engine.verify.forked_ranks import run_ranks
from workbench.engine.verify.single_device import trained_tokens
from workbench.models.preference.preference_loss import PreferenceLoss
from workbench.parallel.mesh import build_mesh
from workbench.plan.schema import Plan

CPU = torch.device("cpu")
DPO: dict[str, Any] = {"finetune.preference": {"beta": 0.3}, "corpus.format": "preferences"}
PAIRS: dict[str, Any] = DPO | {"finetune.method": "full"}
AUX = {"auxiliary_loss": 0.01}
ADAPTED: dict[str, Any] = DPO | {"finetune.lora": {"rank": 4}}
"""Adapters: the reference is the frozen base, by a forward pass of every step."""
PLANS: dict[str, Plan] = {
    "one device": plan(changes=ADAPTED),
    "zero-3": plan(data=2, changes=ADAPTED | {"strategy.data.zero": 3}),
    "tensor and sequence": plan(2, changes=ADAPTED | {"strategy.tensor.sequence": True}),
    "chunked head, pipeline": plan(1, 2, changes=PAIRS | {"strategy.kernels": "fused"}),
    "zero bubble, tied": scheduled("zb-h1", shape=GPT, tied=True, changes=ADAPTED),
    "ring": context_plan(2, "ring", changes=ADAPTED | {"strategy.recompute": "full"}),
    "ring, all weights": context_plan(2, "ring", changes=PAIRS),
    "experts": moe_plan(1, 2, 2, 2, moe=AUX, changes=ADAPTED),
}
MORE: dict[str, Plan] = {
    "zero-1": plan(data=2, changes=PAIRS | {"strategy.data.zero": 1}),
    "zero-2": plan(data=2, changes=ADAPTED | {"strategy.data.zero": 2}),
    "offload": plan(
        data=2, changes=ADAPTED | {"strategy.data.zero": 3, "strategy.data.offload": "parameters"}
    ),
    "delayed update": plan(
        data=2,
        changes=PAIRS
        | {"strategy.data.zero": 2, "strategy.data.offload": "optimizer"}
        | {"finetune.optimizer.delayed_update": True},
    ),
    "4-bit base": plan(
        data=2,
        ffn=64,
        changes=ADAPTED
        | {"strategy.data.zero": 3, "finetune.quantize": {"format": "nf4", "group": 32}},
    ),
    "zero-3, all weights": plan(data=2, changes=PAIRS | {"strategy.data.zero": 3}),
    "chunked head": plan(2, 2, changes=ADAPTED | {"strategy.kernels": "fused"}),
    "ulysses": context_plan(2, "ulysses", changes=ADAPTED),
    "usp and pipeline": context_plan(4, "usp", 1, 2, changes=PAIRS),
    "interleaved": scheduled("interleaved", changes=ADAPTED),
    "zb-v": scheduled("zb-v", changes=ADAPTED),
    "dualpipe-v": scheduled("dualpipe-v", changes=PAIRS),
    "tensor, pipeline and zero-3": plan(2, 2, 2, changes=ADAPTED | {"strategy.data.zero": 3}),
    "experts, all weights": moe_plan(1, 1, 2, 2, moe=AUX, changes=PAIRS),
}


@pytest.mark.parametrize("name", PLANS)
def test_pairs_equal_one_device(name: str) -> None:
    assert_equal_to_one_device(verify(PLANS[name]))


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_pairs_equal_one_device_on_more_meshes(name: str) -> None:
    assert_equal_to_one_device(verify(MORE[name]))


def test_loss_rewards_and_gradient_are_those_of_the_paper() -> None:
    """Equation 7 of 2305.18290, by hand: a gradient of -beta sigmoid(-z) log p_chosen."""
    beta, losses = 0.5, torch.tensor([[2.0, 1.0], [0.5, 0.25], [1.0, 0.0], [3.0, 1.0]])
    losses = losses.double().requires_grad_()
    loss = PreferenceLoss(beta, 1, 4, torch.float64, CPU)
    reference = torch.tensor([[2.5, 1.5], [1.0, 0.5], [0.5, 0.0], [1.0, 1.0]], dtype=torch.double)
    with loss.reference_pass():
        assert not loss(reference, 0).item()
    loss.start(factor=3.0)
    value = loss(losses, 0)
    value.backward()
    z = beta * torch.tensor([(1.0 - 0.75), (-0.5 - -2.0)], dtype=torch.double)
    torch.testing.assert_close(value, -3 * F.logsigmoid(z).sum())
    assert loss.sums.tolist() == [beta * (1.0 - 0.5), beta * (0.75 - 2.0), 2.0]
    slope = 3 * beta * torch.sigmoid(-z)
    right = torch.stack((slope, -slope), 1).flatten()[:, None].expand(4, 2)
    torch.testing.assert_close(losses.grad, right)


def stepped(
    made: Plan, rank: int, dtype: torch.dtype | None = torch.float64
) -> tuple[list[float], float]:
    """Metrics and loss of a first step whose reference is a little off the policy."""
    full = made.resolve()
    session = Session.build(full, build_mesh(full, rank), CPU, dtype)
    tokens, targets, _ = next(random_batches(full))
    samples = torch.tensor(session.share.samples())
    batch = tokens[samples], targets[samples]
    reference = session.reference_log_probs(*batch) + (samples % 5 - 2)
    trained = trained_tokens(targets)
    session.set_reference(reference)
    result = session.step(0, *batch, trained_tokens=trained)
    assert result.parts is not None
    return result.parts.tolist(), result.loss.item()


@pytest.mark.parametrize("name", ["tensor", "ring", "pipeline"])
def test_metrics_are_those_of_one_device(name: str) -> None:
    """Sequences 5k to 5k + 4 have log-ratios 2 to -2: rewards and who wins, by hand."""
    changes = PAIRS | {"training.global_batch": 20}
    made = {
        "tensor": plan(2, changes=changes),
        "ring": context_plan(2, "ring", changes=changes),
        "pipeline": plan(1, 2, changes=changes),
    }[name]
    ratios = torch.arange(20, dtype=torch.float64) % 5 * -1.0 + 2
    chosen, rejected = (0.3 * ratios).view(-1, 2).unbind(1)
    wins = (chosen > rejected).double()
    right = [chosen.mean().item(), rejected.mean().item(), wins.mean().item()]
    loss = -F.logsigmoid(chosen - rejected).mean().item()
    for metrics, of_step in run_ranks(2, lambda rank: stepped(made, rank), seconds=60):
        assert metrics == pytest.approx(right, rel=1e-12)
        assert of_step == pytest.approx(loss, rel=1e-12)


def test_metrics_are_not_scaled_as_the_loss_is_in_fp16() -> None:
    made = plan(changes=PAIRS | {"strategy.precision": "fp16", "training.global_batch": 20})
    metrics, loss = stepped(made, 0, None)
    assert metrics == pytest.approx([0.0, 0.0, 0.8], abs=1e-6)
    ratios = torch.tensor([1.0, 1.0, -4.0, 1.0, 1.0])  # of pairs (2, 1), (0, -1), (-2, 2) ...
    assert loss == pytest.approx(-F.logsigmoid(0.3 * ratios).mean().item(), rel=1e-5)


def test_held_out_pairs_are_evaluated_as_they_are_trained() -> None:
    full = plan(changes=PAIRS).resolve()
    session = Session.build(full, build_mesh(full, 0), CPU, torch.float64)
    tokens, targets, _ = next(random_batches(full))
    samples = torch.tensor(session.share.samples())
    reference = torch.zeros(samples.shape, dtype=torch.float64)
    batch = tokens[samples], targets[samples]
    session.set_reference(reference)
    held_out = session.evaluate(*batch)
    assert held_out is not None and session.preference is not None
    sums = session.preference.loss.sums.clone()
    result = session.step(0, *batch, trained_tokens=1)
    pairs = len(tokens) // 2
    assert held_out.item() / pairs == pytest.approx(result.loss.item(), rel=1e-12)
    assert result.parts is not None
    assert (sums / pairs).tolist() == pytest.approx(result.parts.tolist(), rel=1e-12)


def test_odd_sequences_are_no_pairs() -> None:
    with pytest.raises(ValueError, match="3 sequences; legal: pairs"):
        PreferenceLoss(0.1, 1, 3, torch.float32, CPU)
