"""Memory-centric tiling of linears: equal to one device, a bounded number of tiles gathered, faults
that `verify` finds.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.parallel.small import GPT, LLAMA, plan
from tests.parallel.test_equality import assert_equal_to_one_device
from tests.parallel.test_mutations import failure_of
from workbench.engine.session import Session
from workbench.engine.verify.equivalence import verify
from workbench.engine.verify.forked_ranks import run_ranks
from workbench.parallel.data.sharded_params import ShardedParams
from workbench.parallel.data.tiled_linear import TiledLinear
from workbench.parallel.data.zero_shards import ParamAndGradStore
from workbench.parallel.mesh import build_mesh
from workbench.plan.schema import Plan

CPU = torch.device("cpu")
TILES = {
    "strategy.data.zero": 3,
    "strategy.data.reduce": "microbatch",
    "strategy.data.tile_factor": 4,
}
CASES: list[tuple[int, dict[str, Any], dict[str, Any]]] = [
    (2, LLAMA, {"strategy.recompute": "full", "strategy.data.offload": "parameters"}),
    (2, GPT, {"strategy.recompute": ["blocks.*.mlp", 1], "strategy.data.in_flight": 3}),
    (4, LLAMA, {"strategy.context.size": 2, "strategy.data.offload": "optimizer"}),
    (2, GPT, {"strategy.data.reduce": "step"}),
    (1, LLAMA, {"strategy.data.offload": "parameters", "strategy.recompute": "selective"}),
    (2, LLAMA, {"strategy.recompute": "full", "strategy.offload_activations": True}),
    (2, GPT, {"strategy.data.offload": "parameters", "training.optimizer.delayed_update": True}),
]


def tiled(gpus: int, shape: dict[str, Any], changes: dict[str, Any]) -> Plan:
    return plan(1, 1, gpus, shape=shape, microbatches=2, changes={**TILES, **changes})


@pytest.mark.parametrize(
    ("gpus", "shape", "changes"),
    [CASES[0], *(pytest.param(*case, marks=pytest.mark.slow) for case in CASES[1:])],
)
def test_tiles_equal_one_device(gpus: int, shape: dict[str, Any], changes: dict[str, Any]) -> None:
    assert_equal_to_one_device(verify(tiled(gpus, shape, changes), "fp64"))


@pytest.mark.parametrize(("in_flight", "recompute"), [(1, "none"), (2, "full"), (3, "none")])
def test_no_more_tiles_are_gathered_than_are_in_flight(
    in_flight: int, recompute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"strategy.data.in_flight": in_flight, "strategy.recompute": recompute}
    made = tiled(1, GPT, changes).resolve()

    def most_gathered(rank: int) -> tuple[int, int]:
        session = Session.build(made, build_mesh(made, rank), CPU)
        model = session.part.stages[0]
        linears = [module for module in model.modules() if isinstance(module, TiledLinear)]
        buckets = {
            id(b.params): b.params for own in session.part.store.buckets.values() for b in own
        }
        tiles = {id(tile) for linear in linears for tile in linear.weight}
        of_tiles = [b for b in buckets.values() if {id(p) for p in b.parameters.values()} <= tiles]
        most = 0
        original = ShardedParams.unshard

        def counted(self: ShardedParams) -> None:
            nonlocal most
            original(self)
            most = max(most, sum(isinstance(b, ShardedParams) and b.is_unsharded for b in of_tiles))

        monkeypatch.setattr(ShardedParams, "unshard", counted)
        tokens = torch.randint(257, (2, 2, 16))
        session.step(0, tokens, tokens)
        return most, sum(isinstance(b, ShardedParams) and b.is_unsharded for b in of_tiles)

    assert run_ranks(1, most_gathered) == [(in_flight, 0)]


def forget_a_tile(monkeypatch: pytest.MonkeyPatch) -> str:
    original = ParamAndGradStore.accumulate_product

    def all_but_one(
        self: ParamAndGradStore, weight: nn.Parameter, a: torch.Tensor, b: torch.Tensor
    ) -> None:
        last = self._bucket_of[id(weight)][2] == "blocks.1.mlp.up.weight.2"
        original(self, weight, a * (not last), b)

    monkeypatch.setattr(ParamAndGradStore, "accumulate_product", all_but_one)
    return "blocks.1.mlp.up.weight"


def take_outputs_of_the_next_tile(monkeypatch: pytest.MonkeyPatch) -> str:
    original = TiledLinear.forward

    def turned(self: TiledLinear, x: torch.Tensor) -> torch.Tensor:
        y = original(self, x)
        return y.roll(y.shape[-1] // len(self.weight), -1)

    monkeypatch.setattr(TiledLinear, "forward", turned)
    return ""


@pytest.mark.parametrize("fault", [forget_a_tile, take_outputs_of_the_next_tile])
def test_a_fault_of_tiles_is_found(fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    name = fault(monkeypatch)
    assert name in failure_of(verify(tiled(2, GPT, {})))["tensor"]
