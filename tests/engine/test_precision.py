"""What 16 bits mean: gradients add up and are reduced in `gradient_dtype`, norms and masters have
32 bits.
"""

from __future__ import annotations

import io
from dataclasses import asdict
from functools import lru_cache, partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.parallel.small import GPT, LLAMA, plan
from workbench.engine import session as session_module
from workbench.engine.precision import plan_dtypes, set_determinism, set_matmul_precision
from workbench.engine.session import Session
from workbench.engine.verify.equivalence import _Recorder
from workbench.engine.verify.forked_ranks import run_ranks
from workbench.errors import PlanError
from workbench.interop.launch_environment import environment
from workbench.models import Transformer
from workbench.models.weight_init import initial_value
from workbench.parallel.layout import Layout
from workbench.parallel.mesh import build_mesh
from workbench.plan.model.model_shape import Shape
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.rules.supported import require
from workbench.plan.schema import Plan

WIDE, NARROW = torch.float32, torch.bfloat16
NAMED = {"fp32": WIDE, "bf16": NARROW}


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    """What torch imports late is imported before ranks are forked."""
    _trained(made(microbatches=1), 0)


def made(
    tensor: int = 1,
    pipeline: int = 1,
    data: int = 1,
    gradients: str = "fp32",
    microbatches: int = 4,
) -> ResolvedPlan:
    changes = {
        "strategy.precision": "bf16",
        "strategy.gradient_dtype": gradients,
        "training.seed": 5,
    }
    return plan(
        tensor, pipeline, data, shape=GPT, microbatches=microbatches, changes=changes
    ).resolve()


def text_of(made: ResolvedPlan) -> Tensor:
    """All microbatches of a step [M x data, B, T + 1]."""
    t = made.training
    shape = (t.global_batch // t.micro_batch, t.micro_batch, t.sequence_length + 1)
    return torch.randint(made.vocab, shape, generator=torch.Generator().manual_seed(1))


def plain_gradients(made: ResolvedPlan) -> list[dict[str, Tensor]]:
    """The 16-bit gradients of every microbatch, each by itself, from a plain model."""
    model = Transformer(made.shape).to(NARROW)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(
                initial_value(name, tuple(p.shape), made.shape.layers, made.training.seed, NARROW)
            )
    found = []
    for text in text_of(made):
        model.zero_grad()
        loss = model(text[:, :-1], text[:, 1:]) * (
            1 / (made.training.global_batch * made.training.sequence_length)
        )
        loss.backward()
        found.append(
            {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        )
    return found


class Trained(NamedTuple):
    """Gradients before clipping, parameters and masters after a step, and the gradient norm."""

    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]
    masters: dict[str, Tensor]
    norm: float


def trained(made: ResolvedPlan) -> list[Trained]:
    """A step of every rank."""
    answers = run_ranks(made.world_size, partial(_trained, made))
    return [Trained(**torch.load(io.BytesIO(answer))) for answer in answers]


def _trained(made: ResolvedPlan, rank: int) -> bytes:
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
    exact = (
        torch.stack([g.double().square().sum() for g in rank.gradients.values()])
        .sum()
        .sqrt()
        .item()
    )
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
        holders = [
            (rank.parameters[name], rank.masters[name]) for rank in ranks if name in rank.parameters
        ]
        kinds = {(p.float().numpy().tobytes(), m.numpy().tobytes()) for p, m in holders}
        assert len(holders) == 4 and len(kinds) == (1 if "norm" in name else 2), name
    assert len({rank.norm for rank in ranks}) == 1


@pytest.mark.parametrize("precision", ["tf32", "fp8"])
def test_cpu_ranks_have_no_narrow_products(precision: str) -> None:
    with pytest.raises(
        PlanError,
        match=rf"precision.*is {precision}, which CPU ranks do not have; legal: fp32, bf16",
    ):
        plan(changes={"strategy.precision": precision}).resolve()


def on_a_card(precision: str) -> ResolvedPlan:
    return Plan.of(
        "tiny", gpu="h100-sxm-80gb", gpus=1, set={"strategy.precision": precision}
    ).resolve()


def test_tf32_is_fp32_whose_products_round_their_inputs() -> None:
    before = torch.get_float32_matmul_precision()
    try:
        for precision, products in (("tf32", "high"), ("fp32", "highest"), ("bf16", "highest")):
            set_matmul_precision(on_a_card(precision))
            assert torch.get_float32_matmul_precision() == products
    finally:
        torch.set_float32_matmul_precision(before)
    assert plan_dtypes(on_a_card("tf32")) == plan_dtypes(on_a_card("fp32")) == (WIDE, WIDE)
    require(on_a_card("tf32"), "run")


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_plan_may_ask_for_kernels_that_repeat(deterministic: bool) -> None:
    plan = on_a_card("bf16").replace(**{"training.deterministic": deterministic}).resolve()
    try:
        set_determinism(plan)
        assert torch.are_deterministic_algorithms_enabled() is deterministic
    finally:
        torch.use_deterministic_algorithms(False)
    assert ("CUBLAS_WORKSPACE_CONFIG" in environment(plan, cores=8)) is deterministic


def test_a_grid_of_gpus_takes_kernels_that_repeat() -> None:
    """What an operator strategy replicates, every rank of the grid computes for itself."""
    changes = {
        "strategy.tensor.size": 2,
        "strategy.operators": {"blocks.*.mlp.down": "((1,2),(2,1))"},
    }
    plan = Plan.of("tiny", gpu="h100-sxm-80gb", gpus=2, set=changes).resolve()
    assert plan.deterministic_kernels and not plan.training.deterministic
    assert "CUBLAS_WORKSPACE_CONFIG" in environment(plan, cores=8)
    assert "NCCL_ALGO" not in environment(plan, cores=8)
    on_cpus = Plan.of("tiny", gpu="local", gpus=2, set=changes).resolve()
    assert not on_cpus.deterministic_kernels


MIXTURE = {**LLAMA, "moe": {"experts": 4, "top_k": 2, "ffn": 24}}
NARROW_MESHES: dict[str, tuple[tuple[int, int, int], dict[str, Any]]] = {
    "one": ((1, 1, 1), {}),
    "data": ((1, 1, 2), {}),
    "tensor": ((2, 1, 1), {}),
    "sequence": ((2, 1, 1), {"strategy.tensor.sequence": True}),
    "pipeline": ((1, 2, 1), {}),
    "ring": ((1, 1, 2), {"strategy.context.size": 2}),
    "ulysses": ((1, 1, 2), {"strategy.context.size": 2, "strategy.context.algorithm": "ulysses"}),
    "expert": ((1, 1, 2), {"strategy.expert.size": 2}),
    "zero-1": ((1, 1, 2), {"strategy.data.zero": 1}),
    "zero-2": ((1, 1, 2), {"strategy.data.zero": 2, "strategy.data.reduce": "microbatch"}),
    "zero-3": ((1, 1, 2), {"strategy.data.zero": 3}),
    "tensor x data": ((2, 1, 2), {"strategy.data.zero": 1, "strategy.tensor.sequence": True}),
    "pipeline x data": ((1, 2, 2), {"strategy.data.zero": 1}),
}


def clipped(mesh: str, precision: str) -> ResolvedPlan:
    """Four sequences in microbatches of one; the clip bites in every step, and SGD shows by how
    much.
    """
    sizes, changes = NARROW_MESHES[mesh]
    shape = MIXTURE if mesh == "expert" else {**LLAMA, "tied": " x " in mesh}
    changes = {
        "strategy.precision": precision,
        "strategy.gradient_dtype": "auto",
        "training.optimizer.name": "sgd",
        "training.optimizer.clip": 0.05,
        "training.optimizer.weight_decay": 0.0,
        "training.optimizer.decay": "constant",
        "training.global_batch": 4,
        "training.micro_batch": 1,
        **changes,
    }
    return plan(*sizes, shape=shape, layers=2, changes=changes).resolve()


def moved(made: ResolvedPlan, rank: int) -> bytes:
    """How far two steps have moved the masters of a rank."""
    session = Session.build(made, build_mesh(made, rank), torch.device("cpu"))
    store, states, data = session.part.store, session.optimizer.state(), session.mesh["data"]
    masters = {
        name: states[name].get("master", value.detach()) for name, value in store.values.items()
    }
    before = {name: x.clone() for name, x in masters.items()}
    text = text_of(made).chunk(data.size)[data.index]
    for index in range(2):
        session.step(index, text[..., :-1], text[..., 1:])
    answer = io.BytesIO()
    torch.save(
        [(asdict(store.layouts[name]), x - before[name]) for name, x in masters.items()], answer
    )
    return answer.getvalue()


@lru_cache
def in_fp32(shape: Shape) -> dict[str, Tensor]:
    """What one device moves in fp32, by name."""
    (answer,) = run_ranks(1, partial(moved, clipped("one", "fp32").replace(model=shape).resolve()))
    return {layout["name"]: x for layout, x in torch.load(io.BytesIO(answer))}


def distance(mesh: str, precision: str) -> float:
    """Of a mesh's movement in `precision` from one device's in fp32, relative to that, on the worst
    rank.
    """
    made, whole = clipped(mesh, precision), in_fp32(clipped(mesh, "fp32").shape)
    worst = 0.0
    for answer in run_ranks(made.world_size, partial(moved, made)):
        error = size = torch.zeros(())
        for fields, mine in torch.load(io.BytesIO(answer)):
            layout = Layout(**fields)
            for (part, _), (expected, _) in zip(
                layout.parts(mine), layout.parts(layout.take(whole[layout.name]))
            ):
                error, size = (
                    error + (part - expected).square().sum(),
                    size + expected.square().sum(),
                )
        worst = max(worst, float((error / size).sqrt()))
    return worst


ROUNDING = {"fp16": 2**-10, "bf16": 2**-7}
"""Twice what a weight, an activation or a gradient loses by rounding, as it shows in what they
move.
"""


@pytest.mark.slow
@pytest.mark.drawn(8)
@pytest.mark.parametrize("precision", ROUNDING)
@pytest.mark.parametrize("mesh", NARROW_MESHES)
def test_accumulated_and_clipped_steps_in_16_bits_are_those_of_fp32(
    mesh: str, precision: str
) -> None:
    assert distance(mesh, precision) < ROUNDING[precision]


def test_gradients_that_stay_scaled_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    in_fp32(clipped("data", "fp32").shape)  # the reference, which is cached, is without the fault
    monkeypatch.setattr(session_module, "clip_factor", lambda norm, limit: None)
    assert distance("data", "fp16") > 1
