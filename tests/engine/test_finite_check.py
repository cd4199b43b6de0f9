"""A loss or norm that is not finite is traced to the rank whose own part is not."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.test_loop import refusal, steps, trained
from tests.engine.test_loss_scaler import CPU, Planted
from tests.engine.test_precision import text_of
from tests.parallel.small import plan
from tests.parallel.test_initial_weights import users
from workbench.engine.session import Session, StepResult
from workbench.engine.verify.finite_check import gather_parts, origin
from workbench.engine.verify.forked_ranks import run_ranks
from workbench.parallel.mesh import build_mesh
from workbench.plan.resolved_plan import ResolvedPlan

MESHES: dict[str, tuple[tuple[int, int, int], dict[str, Any]]] = {
    "data": ((1, 1, 2), {}),
    "zero-1": ((1, 1, 2), {"strategy.data.zero": 1}),
    "zero-3": ((1, 1, 2), {"strategy.data.zero": 3}),
    "tensor": ((2, 1, 1), {}),
    "pipeline": ((1, 2, 1), {}),
    "context": ((1, 1, 2), {"strategy.context.size": 2, "training.global_batch": 4}),
    "pipeline, data": ((1, 2, 2), {}),
}


def spoil(session: Session, fault: str) -> None:
    """Plant a NaN in this rank's parameters, or in what its first layer puts out."""
    stage = next(iter(session.part.stages.values()))
    if fault == "parameter":
        values = session.part.store.values
        next(x for x in values.values() if x.numel()).view(-1)[0] = torch.nan
    if fault == "output":
        next(iter(stage.children())).register_forward_hook(lambda _, __, y: y * torch.nan)


def found(made: ResolvedPlan, fault: str, guilty: tuple[int, ...], rank: int) -> tuple[Any, ...]:
    """Origin that a rank finds in a step, the fault planted on `guilty` ranks."""
    session = Session.build(made, build_mesh(made, rank), CPU)
    origins: list[tuple[list[int], str]] = []

    def ask(result: StepResult) -> None:
        assert result.own_loss is not None
        assert not (result.loss.isfinite() and result.gradient_norm.isfinite())
        origins.append(origin(gather_parts(session, result.own_loss.item())))

    session.on_result = ask
    if rank in guilty:
        spoil(session, fault)
    data = session.mesh["data"]
    text = text_of(made).chunk(data.size)[data.index]
    plant = Planted(session.part.store, fault == "gradient" and rank in guilty)
    session.step(0, text[..., :-1], text[..., 1:], plant)
    return origins[0]


def asked(mesh: str, fault: str, guilty: tuple[int, ...]) -> tuple[list[int], str]:
    if mesh == "a user's model":
        made = users(1, 2, {})
    else:
        sizes, changes = MESHES[mesh]
        made = plan(*sizes, changes=changes, layers=2, microbatches=2).resolve()
    first, *others = run_ranks(made.world_size, partial(found, made, fault, guilty), seconds=60)
    assert all(other == first for other in others), "ranks must agree"
    ranks, words = first
    return ranks, words


@pytest.mark.parametrize(
    ("mesh", "fault", "guilty"),
    [
        *((mesh, "parameter", 1) for mesh in MESHES),
        *((mesh, "gradient", 1) for mesh in ("zero-1", "zero-3", "pipeline")),
        ("pipeline", "gradient", 0),
        pytest.param("zero-3", "parameter", 0, marks=pytest.mark.slow),
        pytest.param("tensor", "parameter", 0, marks=pytest.mark.slow),
    ],
)
def test_the_rank_of_a_nan_is_named_with_its_tensor(mesh: str, fault: str, guilty: int) -> None:
    ranks, words = asked(mesh, fault, (guilty,))
    assert ranks == [guilty]
    assert words.startswith(fault) and f"of rank {guilty} alone is not finite" in words


@pytest.mark.parametrize(
    ("mesh", "guilty", "named"),
    [
        ("data", 1, [1]),
        ("zero-3", 0, [0]),
        ("a user's model", 1, [1]),
        ("pipeline, data", 1, [1, 3]),
    ],
)
def test_ranks_whose_own_loss_alone_is_nan_are_named(
    mesh: str, guilty: int, named: list[int]
) -> None:
    ranks, words = asked(mesh, "output", (guilty,))
    assert ranks == named and "the loss of the sequences of rank" in words


@pytest.mark.parametrize(
    ("mesh", "fault", "guilty"),
    [
        ("data", "parameter", (0, 1)),
        ("data", "output", (0, 1)),
        ("pipeline", "output", (0,)),
        ("tensor", "output", (1,)),
    ],
)
def test_nobody_is_blamed_for_what_all_have(mesh: str, fault: str, guilty: tuple[int, ...]) -> None:
    assert asked(mesh, fault, guilty)[0] == []


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_on_gpus_whose_host_looks_later_the_update_changes_nothing(optimizer: str) -> None:
    made = plan(changes={"training.optimizer.name": optimizer}, layers=2).resolve()
    session = Session.build(made, build_mesh(made, 0), CPU)
    text, store = text_of(made), session.part.store
    session.device = torch.device("cuda", 0)
    session.step(0, text[..., :-1], text[..., 1:])
    before = {name: x.clone() for name, x in store.values.items()}
    session.step(1, text[..., :-1], text[..., 1:], Planted(store, True))
    assert all(torch.equal(x, before[name]) for name, x in store.values.items())


def test_a_norm_that_is_not_finite_ends_training_before_it_reaches_the_weights(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Session.step

    def broken(self: Session, index: int, *rest: Any) -> StepResult:
        if index == 2:
            rest = (*rest[:2], Planted(self.part.store, True), *rest[3:])
        return run(self, index, *rest)

    monkeypatch.setattr(Session, "step", broken)
    code, records = trained(tmp_path / "run", text, training__steps=5, checkpoint__every=1)
    error = refusal(tmp_path / "run")
    assert code == 1 and error["step"] == 2 and "gradient norm of step 2 is inf" in error["message"]
    assert "training.optimizer.learning_rate" in error["message"]
    assert steps(records, "step") == [0, 1] and steps(records, "checkpoint") == [1, 2]
