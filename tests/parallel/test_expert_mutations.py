"""Planted faults in MoE and expert parallelism: `verify` fails with each, and names a tensor."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.parallel.test_expert import moe_plan
from tests.parallel.test_mutations import failure_of
from workbench.engine.session import Session
from workbench.engine.verify.equivalence import verify
from workbench.models.moe import MoE
from workbench.models.moe_routing import ExpertRows, capacity_rows
from workbench.parallel import apply_strategy
from workbench.parallel.expert import apply_expert as expert_apply
from workbench.parallel.expert import token_dispatch
from workbench.parallel.expert.apply_expert import gradient_reduction_axes
from workbench.parallel.expert.aux_loss import AuxLossCarrier


def on_ranks(monkeypatch: pytest.MonkeyPatch, plant: Callable[[MoE], None]) -> None:
    """Plant a fault in the MoE layers of the ranks, not of the single device."""
    original = Session.build.__func__  # type: ignore[attr-defined]

    def build(cls: type[Session], *arguments: Any, **more: Any) -> Session:
        session: Session = original(cls, *arguments, **more)
        for stage in session.part.stages.values():
            for module in stage.modules():
                if isinstance(module, MoE):
                    plant(module)
        return session

    monkeypatch.setattr(Session, "build", classmethod(build))


def test_expert_gradients_summed_over_all_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(layouts: Any, tensor: Any, mesh: Any) -> Any:
        return dict.fromkeys(layouts, (mesh["replicas"],))

    monkeypatch.setattr(apply_strategy, "gradient_reduction_axes", wrong)
    assert ".experts." in failure_of(verify(moe_plan(data=2, expert=2)))["tensor"]


def test_expert_gradients_averaged_over_all_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    def halve(module: MoE) -> None:
        for parameter in module.experts.parameters():
            parameter.register_hook(lambda gradient: gradient / 2)

    on_ranks(monkeypatch, halve)
    answer = verify(moe_plan(data=2, expert=2, changes={"training.optimizer.clip": None}))
    assert ".experts." in failure_of(answer)["tensor"]
    assert answer["max_relative_diff"]["gradients"] == pytest.approx(0.5, rel=1e-6)


def test_expert_gradients_not_summed_over_expert_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    original = gradient_reduction_axes

    def wrong(layouts: Any, tensor: Any, mesh: Any) -> Any:
        sums = original(layouts, tensor, mesh)
        return {
            name: (mesh["pipeline"],) if ".experts." in name else axes
            for name, axes in sums.items()
        }

    monkeypatch.setattr(apply_strategy, "gradient_reduction_axes", wrong)
    assert ".experts." in failure_of(verify(moe_plan(data=4, expert=2)))["tensor"]


def test_tokens_combined_in_the_wrong_order(monkeypatch: pytest.MonkeyPatch) -> None:
    original = token_dispatch.transpose_groups

    def wrong(x_RD: Tensor, counts: Sequence[Sequence[int]]) -> Tensor:
        returning = isinstance(counts[0], tuple)
        return x_RD if returning else original(x_RD, counts)

    monkeypatch.setattr(token_dispatch, "transpose_groups", wrong)
    assert failure_of(verify(moe_plan(data=2, expert=2)))["tensor"]


def test_gates_not_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    def ungated(module: MoE) -> None:
        original = module.rows

        def rows(choice: Any) -> tuple[ExpertRows, Tensor]:
            found, gates_NK = original(choice)
            return found, torch.ones_like(gates_NK)

        module.rows = rows  # type: ignore[method-assign, assignment]

    on_ranks(monkeypatch, ungated)
    assert failure_of(verify(moe_plan(data=2, expert=2)))["tensor"]


def test_aux_loss_by_rank_instead_of_by_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_rank(module: MoE) -> None:
        original = module.route._aux_loss

        def aux_loss(scores_BTE: Tensor, experts_BTK: Tensor) -> Tensor:
            return original(scores_BTE.flatten(0, 1)[None], experts_BTK.flatten(0, 1)[None])

        module.route._aux_loss = aux_loss  # type: ignore[method-assign]

    on_ranks(monkeypatch, by_rank)
    worst = failure_of(verify(moe_plan(data=2, expert=2)))
    assert worst["kind"] in ("gradients", "weights")


def test_capacity_of_a_rank_instead_of_a_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    original = capacity_rows

    def by_rank(module: MoE) -> None:
        def rows(choice: Any) -> tuple[ExpertRows, Tensor]:
            found = original(choice.experts_BTK.flatten(0, 1)[None], module.moe)
            assert found.kept_NK is not None
            return found, choice.gates_BTK.flatten(0, 1) * found.kept_NK

        module.rows = rows  # type: ignore[method-assign, assignment]

    on_ranks(monkeypatch, by_rank)
    assert failure_of(verify(moe_plan(data=2, expert=2, moe={"capacity": 0.75})))["tensor"]


def test_router_gradient_not_summed_over_tensor_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(layouts: Any, tensor: Any, mesh: Any) -> Any:
        return {name: axes[-1:] for name, axes in original(layouts, tensor, mesh).items()}

    original = gradient_reduction_axes
    monkeypatch.setattr(apply_strategy, "gradient_reduction_axes", wrong)
    assert failure_of(verify(moe_plan(tensor=2)))["tensor"].endswith("route.weight")


def test_aux_loss_counted_by_every_tensor_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_apply, "scale_gradient", lambda loss, scale: loss)
    assert failure_of(verify(moe_plan(tensor=2)))["tensor"]


def test_aux_loss_of_a_stage_without_the_head_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AuxLossCarrier, "__call__", lambda self, x_BTD, aux_loss: x_BTD)
    assert failure_of(verify(moe_plan(pipeline=2)))["tensor"]


def test_aux_loss_counts_not_all_reduced_over_context(monkeypatch: pytest.MonkeyPatch) -> None:
    def alone(module: MoE) -> None:
        module.route.reduce_counts = lambda counts: counts

    on_ranks(monkeypatch, alone)
    assert failure_of(
        verify(moe_plan(data=2, changes={"strategy.context.size": 2}, moe={"auxiliary_loss": 0.5}))
    )
