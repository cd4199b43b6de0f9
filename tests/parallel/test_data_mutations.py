"""Planted faults in ZeRO: `verify` fails with each, and names the first wrong tensor."""

from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from tests.parallel.test_data import sharded
from tests.parallel.test_mutations import failure_of
from workbench.engine.session import Session
from workbench.engine.verify.equivalence import verify
from workbench.parallel.data import gradient_reduction
from workbench.parallel.data.data_collectives import local_shard
from workbench.parallel.data.sharded_params import ShardedParams
from workbench.parallel.data.zero_shards import ParamAndGradStore
from workbench.parallel.layout import square_norm
from workbench.parallel.mesh import MeshAxis

TWO, FOUR = (1, 1, 2), (1, 1, 4)


@pytest.mark.parametrize("data", [{"zero": 1}, {"zero": 3, "reduce": "microbatch"}], ids=str)
def test_a_shard_stepped_with_its_neighbours_gradient(
    monkeypatch: pytest.MonkeyPatch, data: dict[str, Any]
) -> None:
    def reduce_scatter(flat: Tensor, axis: MeshAxis) -> None:
        dist.all_reduce(flat, group=axis.group)
        local_shard(flat, axis).copy_(
            flat.view(axis.size, -1)[(axis.index + 1) % axis.size].clone()
        )

    monkeypatch.setattr(gradient_reduction, "start_reduce_scatter", reduce_scatter)
    assert failure_of(verify(sharded(TWO, "llama", 2, data)))["kind"] == "gradients"


def test_updated_params_that_are_not_all_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    original, gathered = ParamAndGradStore.gather_updated_params, set()

    def gather(self: ParamAndGradStore) -> None:
        if id(self) not in gathered:  # the weights that verification starts from
            original(self)
            gathered.add(id(self))

    monkeypatch.setattr(ParamAndGradStore, "gather_updated_params", gather)
    answer = verify(sharded(TWO, "llama", 2, {"zero": 1}))
    assert failure_of(answer)
    assert answer["max_relative_diff"]["gradients"] <= answer["tolerance"], (
        "the first step is right"
    )


def test_unsharded_params_that_are_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ShardedParams, "reshard", lambda self: None)
    original = ParamAndGradStore.gather_updated_params

    def gather(self: ParamAndGradStore) -> None:
        original(self)
        if not hasattr(self, "fresh"):  # the weights that verification starts from
            self.fresh = True  # type: ignore[attr-defined]
            for bucket in self._all_buckets():
                bucket.params.is_unsharded = False

    monkeypatch.setattr(ParamAndGradStore, "gather_updated_params", gather)
    answer = verify(sharded(TWO, "llama", 2, {"zero": 3}))
    assert failure_of(answer)
    assert answer["max_relative_diff"]["gradients"] <= answer["tolerance"], (
        "the first step is right"
    )


@pytest.mark.parametrize("data", [{"zero": 1}, {"zero": 2, "reduce": "microbatch"}], ids=str)
def test_hybrid_shards_not_all_reduced_over_their_replicas(
    monkeypatch: pytest.MonkeyPatch, data: dict[str, Any]
) -> None:
    monkeypatch.setattr(gradient_reduction, "start_all_reduce", lambda flat, axis: None)
    assert (
        failure_of(verify(sharded(FOUR, "llama", 2, {"shard": 2, **data})))["kind"] == "gradients"
    )


def test_clipping_by_the_norm_of_the_local_shards(monkeypatch: pytest.MonkeyPatch) -> None:
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
    changes = {"training.optimizer.name": "sgd", "training.optimizer.clip": 0.05}
    answer = verify(sharded(TWO, "llama", 2, {"zero": 1}, **changes))
    assert failure_of(answer)["kind"] == "weights"
    assert answer["max_relative_diff"]["gradients"] <= answer["tolerance"]
