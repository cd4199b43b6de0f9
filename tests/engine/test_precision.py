"""What 16 bits mean: gradients add up and are reduced in `gradient_dtype`, norms and masters have 32 bits."""

from __future__ import annotations

import io
from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tests.parallel.small import GPT, plan
from workbench.engine.forked import run_ranks
from workbench.engine.precision import dtypes, set_products
from workbench.engine.session import Session
from workbench.engine.verify import _Recorder
from workbench.models import Transformer
from workbench.models.initialise import initial_value
from workbench.parallel.mesh import build_mesh
from workbench.plan.errors import PlanError
from workbench.plan.schema import Plan
from workbench.plan.support import require

WIDE, NARROW = torch.float32, torch.bfloat16
NAMED = {"fp32": WIDE, "bf16": NARROW}


def made(tensor: int = 1, pipeline: int = 1, data: int = 1, gradients: str = "fp32", microbatches: int = 4) -> Plan:
    changes = {"strategy.precision": "bf16", "strategy.gradient_dtype": gradients, "training.seed": 5}
    return plan(tensor, pipeline, data, shape=GPT, microbatches=microbatches, changes=changes).complete()


def text_of(made: Plan) -> Tensor:
    """All microbatches of a step [M x data, B, T + 1]."""
    t = made.training
    shape = (t.global_batch // t.micro_batch, t.micro_batch, t.sequence_length + 1)
    return torch.randint(made.shape.vocab, shape, generator=torch.Generator().manual_seed(1))


def plain_gradients(made: Plan) -> list[dict[str, Tensor]]:
    """The 16-bit gradients of every microbatch, each by itself, from a plain model."""
    model = Transformer(made.shape).to(NARROW)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(initial_value(name, tuple(p.shape), made.shape.layers, made.training.seed, NARROW))
    found = []
    for text in text_of(made):
        model.zero_grad()
        loss = model(text[:, :-1], text[:, 1:]) * (1 / (made.training.global_batch * made.training.sequence_length))
        loss.backward()
        found.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    return found


class Trained(NamedTuple):
    """Gradients before clipping, parameters and masters after a step, and the gradient norm."""

    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]
    masters: dict[str, Tensor]
    norm: float


def trained(made: Plan) -> list[Trained]:
    """A step of every rank."""
    answers = run_ranks(made.world_size, partial(_trained, made))
    return [Trained(**torch.load(io.BytesIO(answer))) for answer in answers]


def _trained(made: Plan, rank: int) -> bytes:
    session = Session.build(made, build_mesh(made, rank), torch.device("cpu"))
    data, recorder = session.mesh["data"], _Recorder(session)
    text = text_of(made).chunk(data.size)[data.index]
    norm = session.step(0, text[..., :-1], text[..., 1:], recorder).gradient_norm
    masters = {name: state["master"] for name, state in session.optimizer.state().items()}
    parameters = {name: p.detach() for name, p in session.part.store.values.items()}
    answer = io.BytesIO()
    torch.save(Trained(recorder.gradients, parameters, masters, norm.item())._asdict(), answer)
    return answer.getvalue()


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("gradients", ["fp32", "bf16"])
def test_microbatches_add_up_in_the_gradients_own_dtype(gradients: str, microbatches: int) -> None:
    one = made(gradients=gradients, microbatches=microbatches)
    (rank,) = trained(one)
    dtype = NAMED[gradients]
    for name, gradient in rank.gradients.items():
        expected = torch.zeros(gradient.shape, dtype=dtype)
        for microbatch in plain_gradients(one):
            expected += microbatch[name].to(dtype)
        assert gradient.dtype == dtype and torch.equal(gradient, expected), name
        master = rank.masters[name]
        assert master.dtype == WIDE and torch.equal(master.to(NARROW), rank.parameters[name])
    exact = torch.stack([g.double().square().sum() for g in rank.gradients.values()]).sum().sqrt().item()
    assert rank.norm == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize("gradients, tolerance", [("fp32", 1e-6), ("bf16", 2**-7)])
def test_data_ranks_reduce_in_the_gradients_dtype(gradients: str, tolerance: float) -> None:
    two = made(data=2, gradients=gradients, microbatches=2)
    plain = plain_gradients(two)
    for rank in trained(two):
        for name, gradient in rank.gradients.items():
            assert gradient.dtype == NAMED[gradients]
            wide = torch.stack([microbatch[name].float() for microbatch in plain])
            # Rounding a sum is relative to what was summed, not to what cancellation leaves of it.
            gap = ((gradient.float() - wide.sum(0)).abs() - tolerance * wide.abs().sum(0)).max()
            assert gap <= 0, name


def test_replicas_in_16_bits_stay_equal_to_the_bit() -> None:
    ranks = trained(made(2, 2, 2))
    for name in ("blocks.0.attention_norm.weight", "blocks.0.attention.q.weight"):
        holders = [(rank.parameters[name], rank.masters[name]) for rank in ranks if name in rank.parameters]
        kinds = {(p.float().numpy().tobytes(), m.numpy().tobytes()) for p, m in holders}
        assert len(holders) == 4 and len(kinds) == (1 if "norm" in name else 2), name
    assert len({rank.norm for rank in ranks}) == 1


@pytest.mark.parametrize("precision", ["tf32", "fp8"])
def test_cpu_ranks_have_no_narrow_products(precision: str) -> None:
    with pytest.raises(PlanError, match=rf"precision.*is {precision}, which CPU ranks do not have; legal: fp32, bf16"):
        plan(changes={"strategy.precision": precision}).complete()


def on_a_card(precision: str) -> Plan:
    return Plan.of("tiny", gpu="h100-sxm-80gb", gpus=1, set={"strategy.precision": precision}).complete()


def test_tf32_is_fp32_whose_products_round_their_inputs() -> None:
    before = torch.get_float32_matmul_precision()
    try:
        for precision, products in (("tf32", "high"), ("fp32", "highest"), ("bf16", "highest")):
            set_products(on_a_card(precision))
            assert torch.get_float32_matmul_precision() == products
    finally:
        torch.set_float32_matmul_precision(before)
    assert dtypes(on_a_card("tf32")) == dtypes(on_a_card("fp32")) == (WIDE, WIDE)
    require(on_a_card("tf32"), "run")


def test_fp8_is_refused_with_what_is_legal() -> None:
    with pytest.raises(PlanError, match=r"precision.*'fp8'; this version can run 'fp32' or 'tf32' or 'bf16' or 'fp16'"):
        require(on_a_card("fp8"), "run")
