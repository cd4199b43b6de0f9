"""Planted faults: `verify` fails with each, and names a tensor that the fault makes wrong."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.parallel.small import GPT, LLAMA, plan
from workbench.engine import session as session_module
from workbench.engine.session import Session
from workbench.engine.verify.equivalence import verify
from workbench.parallel.layout import square_norm
from workbench.parallel.pipeline.schedule_executor import ScheduleExecutor
from workbench.parallel.tensor import apply_tensor, row_parallel, vocab_parallel
from workbench.parallel.tensor.column_parallel import ColumnParallelBackward
from workbench.parallel.tensor.row_parallel import RowParallelLinear
from workbench.parallel.tensor.tensor_collectives import reduce_from_tensor_region
from workbench.schedules import Action


def failure_of(answer: dict[str, Any]) -> dict[str, Any]:
    assert not answer["passed"], answer
    worst: dict[str, Any] = answer["worst"]
    assert worst["relative"] > 100 * answer["tolerance"]
    return worst


def test_missing_all_reduce_of_a_row_parallel_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_parallel, "reduce_from_tensor_region", lambda x, axis: x)
    worst = failure_of(verify(plan(2)))
    assert worst["kind"] in ("gradients", "weights") and worst["tensor"] != "loss"


def test_missing_all_reduce_of_column_parallel_input_gradients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def start_reduce(self: ColumnParallelBackward, gradient: Tensor, shape: torch.Size) -> Tensor:
        self.wait_reduce = lambda: None
        return gradient.view(shape)

    monkeypatch.setattr(ColumnParallelBackward, "start_reduce", start_reduce)
    worst = failure_of(verify(plan(2)))
    assert worst["kind"] in ("gradients", "weights") and worst["tensor"] != "loss"


def test_rotary_key_of_latent_attention_without_the_other_ranks_gradients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(apply_tensor, "copy_to_tensor_region", lambda x, axis: x)
    latent = {"kv_rank": 8, "rope_dim": 4, "nope_dim": 8, "value_dim": 6}
    worst = failure_of(verify(plan(2, shape={**LLAMA, "mla": latent})))
    assert worst["kind"] in ("gradients", "weights") and worst["tensor"] != "loss"


def test_bias_added_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: RowParallelLinear, x: Tensor) -> Tensor:
        return reduce_from_tensor_region(F.linear(x, self.weight, self.bias), self.axis)

    monkeypatch.setattr(RowParallelLinear, "forward", forward)
    assert failure_of(verify(plan(2, shape=GPT)))["tensor"]


def test_gradients_summed_instead_of_averaged(monkeypatch: pytest.MonkeyPatch) -> None:
    original = ScheduleExecutor.step

    def step(
        self: ScheduleExecutor, tokens: Tensor, targets: Tensor, scale: float, observe: Any = None
    ) -> Any:
        return original(self, tokens, targets, scale * 2, observe)

    monkeypatch.setattr(ScheduleExecutor, "step", step)
    answer = verify(plan(data=2, changes={"training.optimizer.clip": None}))
    assert failure_of(answer)
    assert answer["max_relative_diff"]["gradients"] == pytest.approx(1.0, rel=1e-6)


def test_tied_embedding_not_reduced_across_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "sum_tied_gradient", lambda *_: None)
    assert failure_of(verify(plan(pipeline=2, tied=True)))["tensor"] == "embedding.tokens.weight"


@pytest.mark.parametrize("mesh", [(2, 1, 1), (1, 2, 1)], ids=["tensor", "pipeline"])
def test_clipping_by_the_local_norm(
    monkeypatch: pytest.MonkeyPatch, mesh: tuple[int, int, int]
) -> None:
    def agree(
        self: Session, loss: Tensor | None, stop: int, by_source: None
    ) -> tuple[Tensor, Tensor, Tensor, None, Tensor]:
        agreed, _, stopping, _, own = original(self, loss, stop, by_source)
        return (
            agreed,
            square_norm(self.part.store.gradients, self.part.store.layouts, self.mesh).sqrt(),
            stopping,
            None,
            own,
        )

    original = Session._agree
    monkeypatch.setattr(Session, "_agree", agree)
    # SGD, because AdamW hardly feels a gradient's size; the clip is tight, so that it bites.
    answer = verify(
        plan(*mesh, changes={"training.optimizer.name": "sgd", "training.optimizer.clip": 0.05})
    )
    assert failure_of(answer)["kind"] == "weights"
    assert answer["max_relative_diff"]["gradients"] <= answer["tolerance"]


def test_dropped_microbatch(monkeypatch: pytest.MonkeyPatch) -> None:
    original = ScheduleExecutor._forward

    def forward(
        self: ScheduleExecutor,
        action: Action,
        state: Any,
        tokens: Tensor,
        targets: Tensor,
        scale: float,
    ) -> None:
        original(self, action, state, tokens, targets, 0.0 if action.microbatch == 3 else scale)

    monkeypatch.setattr(ScheduleExecutor, "_forward", forward)
    assert failure_of(verify(plan(pipeline=2)))["tensor"]


def test_padded_vocabulary_in_the_softmax(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocab_parallel, "mask_vocab_padding", lambda logits, num_rows: None)
    assert failure_of(verify(plan(2)))["tensor"]


def test_a_replica_that_drifted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica that is wrong on one rank only is found on that rank."""
    original = Session.build.__func__  # type: ignore[attr-defined]

    def build(cls: type[Session], plan: Any, mesh: Any, *rest: Any, **more: Any) -> Session:
        session: Session = original(cls, plan, mesh, *rest, **more)
        if mesh.rank == 1:
            norm = session.part.stages[0].get_parameter("final_norm.weight")
            norm.register_hook(lambda gradient: gradient * 1.5)
        return session

    monkeypatch.setattr(Session, "build", classmethod(build))
    worst = failure_of(verify(plan(2)))
    assert worst["rank"] == 1 or worst["tensor"] == "final_norm.weight"
