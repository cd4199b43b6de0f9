"""Loss scaling goes as torch's, and in step: one rank's overflow makes every rank skip, and changes
nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.engine.test_loop import refusal, trained
from tests.engine.test_precision import text_of
from tests.parallel.small import GPT, LLAMA, plan
from workbench.cli.tables import profile_table
from workbench.cli.terminal import console
from workbench.costmodel.communication.collective_volume import STEP_SCALARS_BYTES
from workbench.engine import session as session_module
from workbench.engine.optimizer import loss_scaler as scaler_module
from workbench.engine.optimizer.loss_scaler import (
    INITIAL_SCALE,
    MIN_SCALE,
    STUCK_STEPS,
    LossScaler,
    found_inf,
)
from workbench.engine.session import Session, StepResult
from workbench.engine.step_observer import NullObserver
from workbench.engine.verify.forked_ranks import run_ranks
from workbench.lab.comparison.compare import compare
from workbench.lab.live.run_status import RunProgress, pace_line
from workbench.parallel.data.zero_shards import ParamAndGradStore
from workbench.parallel.mesh import build_mesh
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.rehearsal.rehearse import rehearse
from workbench.runs.diagnose.rank_status import RankStatus
from workbench.runs.run import profile_of
from workbench.runs.store.run_state import State

CPU = torch.device("cpu")
MESHES: dict[str, tuple[tuple[int, int, int], dict[str, Any]]] = {
    "data 2": ((1, 1, 2), {}),
    "tensor 2": ((2, 1, 1), {}),
    "pipeline 2": ((1, 2, 1), {}),
    "tensor 2 x data 2": ((2, 1, 2), {"strategy.tensor.sequence": True}),
    "tensor 2 x pipeline 2": ((2, 2, 1), {}),
    "zero-1": ((1, 1, 2), {"strategy.data.zero": 1}),
    "zero-3": ((1, 1, 2), {"strategy.data.zero": 3}),
    "zero-1 offload": ((1, 1, 2), {"strategy.data.zero": 1, "strategy.data.offload": "optimizer"}),
    "context 2": ((1, 1, 2), {"strategy.context.size": 2, "training.global_batch": 4}),
    "sgd": ((1, 1, 2), {"training.optimizer.name": "sgd"}),
}


def made(
    mesh: Sequence[int], changes: dict[str, Any], shape: dict[str, Any] = LLAMA
) -> ResolvedPlan:
    half = {"strategy.precision": "fp16", "training.optimizer.weight_decay": 0.5}
    return plan(*mesh, shape=shape, changes=half | changes, layers=2, microbatches=2).resolve()


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    """What torch imports late is imported before ranks are forked."""
    one = made((1, 1, 1), {})
    steps(one, {}, 0)


class Seen(NamedTuple):
    """What a step gave, and the state's hash after it."""

    numbers: tuple[float, ...]
    state: tuple[int, ...]


def everything(session: Session) -> list[Tensor]:
    """All that training carries from step to step, but the scale."""
    states = session.optimizer.state().values()
    return [*session.part.store.values.values(), *(x for state in states for x in state.values())]


def fingerprint(session: Session) -> tuple[int, ...]:
    return tuple(
        hash(x.numpy().tobytes()) for x in (x.detach().clone() for x in everything(session))
    )


def numbers(result: StepResult) -> tuple[float, ...]:
    return tuple(
        x.item()
        for x in (result.loss, result.gradient_norm, result.loss_scale, result.skipped)
        if x is not None
    )


def steps(plan: ResolvedPlan, planted: dict[int, int], rank: int) -> list[Seen]:
    """Three steps; before the optimizer, step -> rank that gets an infinity into its last
    gradient.
    """
    session = Session.build(plan, build_mesh(plan, rank), CPU)
    data = session.mesh["data"]
    text = text_of(plan).chunk(data.size)[data.index]
    seen = [Seen((), fingerprint(session))]
    for index in range(3):
        plant = Planted(session.part.store, planted.get(index) == rank)
        result = session.step(index, text[..., :-1], text[..., 1:], plant)
        assert result.skipped is not None and session.scaler is not None
        assert result.loss_scale is not None
        scalars = result.loss.item(), result.loss_scale.item()
        session.scaler.count_skipped(bool(result.skipped), *scalars)
        seen.append(Seen(numbers(result), fingerprint(session)))
    return seen


class Planted(NullObserver):
    """Puts an infinity where gradients are reduced but not yet agreed on."""

    def __init__(self, store: ParamAndGradStore, here: bool) -> None:
        self.store, self.here = store, here

    def moment(self, name: str) -> None:
        if self.here and name == "before_optimizer":
            list(self.store.gradients.values())[-1].view(-1)[-1] = torch.inf


@pytest.mark.parametrize("guilty", [0, 1])
@pytest.mark.parametrize("mesh", MESHES)
def test_an_overflow_on_one_rank_is_skipped_by_all_and_changes_nothing(
    mesh: str, guilty: int
) -> None:
    one = made(*MESHES[mesh])
    for before, skipped, after, last in run_ranks(one.world_size, partial(steps, one, {0: guilty})):
        _, norm, scale, flag = skipped.numbers
        assert (flag, scale) == (1, INITIAL_SCALE) and not norm < float("inf")
        assert skipped.state == before.state
        assert after.numbers[2:] == last.numbers[2:] == (INITIAL_SCALE / 2, 0)
        assert len({before.state, after.state, last.state}) == 3


@pytest.mark.parametrize("mesh", ["tensor 2", "data 2", "tensor 2 x pipeline 2"])
def test_a_rank_that_overflows_alone_on_a_gradient_that_another_counts(mesh: str) -> None:
    """Replicas compute the same; were one to differ, all would still skip."""
    one = made(*MESHES[mesh])
    last = one.world_size - 1
    for seen in run_ranks(one.world_size, partial(steps, one, {1: last})):
        assert [s.numbers[3] for s in seen[1:]] == [0, 1, 0]
        assert seen[2].state == seen[1].state


def test_ranks_that_do_not_agree_would_diverge(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above can fail: here every rank judges by its own gradients."""

    def local(norm: Tensor) -> Tensor:
        return found_inf(norm) * float(torch.distributed.get_rank() == 0)

    monkeypatch.setattr(session_module, "found_inf", local)
    one = made(*MESHES["data 2"])
    first, second = run_ranks(2, partial(steps, one, {0: 0}))
    assert first[1].state == first[0].state and second[1].state != second[0].state


def test_a_skipped_step_that_decays_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "found_inf", lambda norm: torch.zeros(()))
    one = made(*MESHES["sgd"])
    seen = run_ranks(2, partial(steps, one, {0: 0}))[0]
    assert seen[1].state != seen[0].state


def test_the_scale_goes_as_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaler_module, "GROWTH_INTERVAL", 3)
    ours = LossScaler(CPU)
    theirs, tracker = torch.full((), INITIAL_SCALE), torch.zeros((), dtype=torch.int32)
    generator = torch.Generator().manual_seed(3)
    found = [float(x) for x in torch.rand(300, generator=generator) < 0.15]
    # At the top a growth would make the scale infinite: it stays.
    for one in [*found, *[0.0] * 400]:
        ours.update(torch.tensor(one))
        torch._amp_update_scale_(theirs, tracker, torch.tensor(one), 2.0, 0.5, 3)
        assert (ours.scale.item(), ours.good_steps.item()) == (theirs.item(), tracker.item())
    assert ours.scale.item() == 2.0**127


def test_the_scale_is_saved_and_loaded() -> None:
    ours, other = LossScaler(CPU), LossScaler(CPU)
    for found in (0.0, 1.0, 0.0, 0.0):
        ours.update(torch.tensor(found))
        ours.count_skipped(bool(found), 1.0, INITIAL_SCALE)
    other.load(ours.state())
    assert other.state() == ours.state() == {"scale": INITIAL_SCALE / 2, "good": 2, "skipped": 1}


def test_the_scale_stops_at_the_least_and_counts_stuck_steps() -> None:
    scaler, overflowed = LossScaler(CPU), torch.ones(())
    for _ in range(20):
        scaler.update(overflowed)
    assert scaler.scale.item() == MIN_SCALE
    for skipped, loss, scale, stuck in (
        (True, 2.0, MIN_SCALE, 1),
        (True, math.nan, 8.0, 2),
        (True, 2.0, 8.0, 0),
        (False, math.inf, 8.0, 1),
        (False, 2.0, MIN_SCALE, 0),
    ):
        scaler.count_skipped(skipped, loss, scale)
        assert scaler.stuck == stuck


def test_a_run_that_no_loss_scale_makes_finite_fails_and_says_what_to_do(
    tmp_path: Path, text: Path
) -> None:
    sets: dict[str, Any] = {"strategy.precision": "fp16", "training.optimizer.learning_rate": 5}
    code, records = trained(tmp_path / "run", text, **sets, training__steps=40)
    steps = [record for record in records if record["kind"] == "step"]
    error = refusal(tmp_path / "run")
    assert code == 1 and steps[0]["loss"] is not None and len(steps) < 30
    assert f"the last {STUCK_STEPS} steps finite (fp16)" in error["message"]
    assert "learning_rate, or take strategy.precision: bf16" in error["message"]
    assert [record["loss"] for record in steps[1 - STUCK_STEPS :]] == [None] * (STUCK_STEPS - 1)


def test_every_summary_says_that_steps_were_skipped_and_the_last_loss_is_not_finite(
    tmp_path: Path, text: Path
) -> None:
    folder = tmp_path / "run"
    sets: dict[str, Any] = {"strategy.precision": "fp16", "training.optimizer.learning_rate": 5}
    code, records = trained(folder, text, **sets)
    profile = profile_of(folder)
    assert code == 0 and profile.loss[0] is not None and profile.loss[1:] == [None, None]
    assert profile.summary()["skipped_steps"] == 2
    first = f"{profile.loss[0]:.4f}"
    with (wide := console()).capture() as shown:
        wide.print(profile_table(profile))
    table = shown.get()
    assert f"{first}  not finite" in table and "2 of 3" in table
    assert f"{first}, not finite" in profile._repr_html_() and "2 of 3" in profile._repr_html_()
    compared = compare(profile)
    assert "not finite" in repr(compared) and "skipped" in repr(compared)
    (row,) = compared.to_json()["summary"]
    assert (row["last_loss"], row["skipped_steps"], row["steps"]) == (None, 2, 3)
    seen, progress = RankStatus(0), RunProgress(3, 1)
    for record in records:
        seen.take(record)
    progress.add_records(records)
    assert seen.lost_loss.startswith("since step 1 the loss is not finite")
    seen.take({"kind": "step", "step": 3, "loss": 2.0, "action": None, "skipped": False})
    assert seen.lost_loss == ""
    banner = pace_line(State("finished", 1, 3, 0.0), progress)
    assert "loss not finite" in banner and "2 steps skipped" in banner


@pytest.mark.slow
@pytest.mark.drawn(5)
@pytest.mark.parametrize("shape", [LLAMA, GPT], ids=["llama", "gpt"])
@pytest.mark.parametrize("mesh", ["data 2", "tensor 2", "pipeline 2", "context 2", "zero-3"])
def test_fp16_trains_as_fp32(mesh: str, shape: dict[str, Any]) -> None:
    """The scale cancels: loss and norm are those of fp32 within fp16's rounding, gradients kept in
    fp32 or fp16.
    """
    sizes, changes = MESHES[mesh]
    half = made(sizes, changes, shape)
    plain = half.replace(
        **{"strategy.precision": "fp32", "strategy.gradient_dtype": "fp32"}
    ).resolve()
    exact = run_ranks(plain.world_size, partial(unscaled, plain))[0]
    for rank in run_ranks(half.world_size, partial(steps, half, {})):
        for seen, (loss, norm) in zip(rank[1:], exact):
            assert seen.numbers[0] == pytest.approx(loss, rel=2e-3)
            assert seen.numbers[1] == pytest.approx(norm, rel=2e-2)


def unscaled(plan: ResolvedPlan, rank: int) -> list[tuple[float, float]]:
    """Loss and norm of three steps."""
    session = Session.build(plan, build_mesh(plan, rank), CPU)
    data = session.mesh["data"]
    text = text_of(plan).chunk(data.size)[data.index]
    results = (session.step(index, text[..., :-1], text[..., 1:]) for index in range(3))
    return [(r.loss.item(), r.gradient_norm.item()) for r in results]


def test_a_run_that_overflows_by_itself_says_so_and_holds_its_schedule(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first scale is far too large: steps are skipped until it is not; then a second run goes
    on from there.
    """
    monkeypatch.setattr(scaler_module, "INITIAL_SCALE", 2.0**30)
    sets: dict[str, Any] = {
        "strategy.precision": "fp16",
        "training.optimizer.warmup_steps": 10,
        "checkpoint.every": 12,
    }
    sets |= {"checkpoint.asynchronous": False, "training.steps": 24}
    code, records = trained(tmp_path / "run", text, **sets)
    told = [record for record in records if record["kind"] == "step"]
    assert code == 0 and len(told) == 24
    count = next(i for i, record in enumerate(told) if not record["skipped"])
    assert 3 < count < 20, "gradients may overflow again later, as they grow"
    assert [record["loss_scale"] for record in told[: count + 1]] == [
        2.0 ** (30 - i) for i in range(count + 1)
    ]
    assert len({record["learning_rate"] for record in told[: count + 1]}) == 1
    assert told[count + 1]["learning_rate"] == pytest.approx(2 * told[count]["learning_rate"])
    assert (
        told[0]["gradient_norm"] is None
        and told[count]["gradient_norm"] > 0
        and told[0]["loss"] < 10
    )

    sets["checkpoint.load"] = str(tmp_path / "run" / "checkpoints" / "step-00000012")
    code, records = trained(tmp_path / "again", text, **sets)
    again = [record for record in records if record["kind"] == "step"]
    assert code == 0
    same = ("step", "loss", "gradient_norm", "learning_rate", "loss_scale", "skipped")
    assert [[record[key] for key in same] for record in again] == [
        [record[key] for key in same] for record in told[12:]
    ]


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_the_same_step_is_rehearsed_and_needs_no_further_collective(name: str) -> None:
    changes = {
        "training.dropout": 0.1,
        "training.optimizer.name": name,
        "strategy.tensor.sequence": True,
    }
    sizes, narrow = (2, 2, 1), made((2, 2, 1), changes)
    profile = rehearse(narrow)
    calls = profile.collectives[profile.collectives["step"] == 1]
    agreed = calls[calls["action"] == "CLIP"].groupby("rank")[["bytes", "count"]].sum()
    assert set(map(tuple, agreed.to_numpy().tolist())) == {(STEP_SCALARS_BYTES, 1)}
    wide = rehearse(made(sizes, changes | {"strategy.precision": "bf16"})).collectives
    columns = ["rank", "axis", "kind", "bytes", "count", "action"]
    assert sorted(calls[columns].to_numpy().tolist()) == sorted(
        wide[wide["step"] == 1][columns].to_numpy().tolist()
    )
