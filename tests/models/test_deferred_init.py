"""A user's model is built without values where what fills it can be replayed slice by slice."""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import deepcopy
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from tests.parallel.users_model import build, build_plain
from workbench.models.counter_normal import NormalDrawer
from workbench.models.deferred_init import FillReplay, build_deferred

CPU = torch.device("cpu")


def replayed(build: Callable[[], nn.Module], seed: int = 0) -> dict[str, Tensor]:
    """The values of a deferred model, whole."""
    deferred = build_deferred(build)
    assert deferred is not None
    model, fills = deferred
    replay, found = FillReplay(fills, seed, NormalDrawer(CPU, 512)), {}
    for name, value in model.named_parameters():
        found[name] = value.detach()
        if value.is_meta:
            found[name] = torch.full(value.shape, math.nan, dtype=value.dtype)
            replay.fill(found[name], [(0, n) for n in value.shape], name, value.shape)
    return found


def test_values_are_distributed_as_the_factory_s() -> None:
    factory = partial(build_plain, width=64, vocab=2000)
    found, real = replayed(factory), dict(factory().named_parameters())
    assert found.keys() == real.keys()
    for name, value in real.items():
        mine, n = found[name], value.numel()
        assert mine.shape == value.shape and mine.dtype == value.dtype, name
        spread = float(value.std()) if n > 1 else 0.0
        assert abs(float(mine.mean() - value.mean())) <= 7 * spread / math.sqrt(n), name
        assert float(mine.std()) == pytest.approx(spread, rel=7 / math.sqrt(n)), name
    assert torch.equal(found["norm.weight"], torch.ones(64))
    assert torch.equal(found["norm.bias"], torch.zeros(64))
    bound = 1 / math.sqrt(64)
    for name in ("blocks.0.weight", "blocks.1.weight"):
        assert float(found[name].abs().max()) == pytest.approx(bound, rel=0.01)
        assert float(found[name].abs().max()) <= bound


def test_values_depend_on_the_seed_and_the_tensor() -> None:
    one, same, other = (replayed(build_plain, seed) for seed in (1, 1, 2))
    random = [name for name, value in one.items() if float(value.std()) > 0]
    assert len(random) == 7
    for name in random:
        assert torch.equal(one[name], same[name]) and not torch.equal(one[name], other[name])
    assert not torch.equal(one["blocks.0.weight"], one["blocks.1.weight"])


def test_copies_are_equal_as_deepcopy_makes_them() -> None:
    def factory() -> nn.Module:
        layer = nn.Linear(8, 8)
        return nn.Sequential(layer, deepcopy(layer))

    found = replayed(factory)
    assert torch.equal(found["0.weight"], found["1.weight"])


def test_tied_parameters_stay_one() -> None:
    def factory() -> nn.Module:
        first, last = nn.Embedding(20, 8), nn.Linear(8, 20, bias=False)
        last.weight = first.weight
        return nn.Sequential(first, last)

    deferred = build_deferred(factory)
    assert deferred is not None and [name for name, _ in deferred[0].named_parameters()] == [
        "0.weight"
    ]


def with_parameter(make: Callable[[], Tensor]) -> nn.Module:
    model = nn.Linear(6, 6)
    model.weight = nn.Parameter(make())
    return model


def orthogonal() -> nn.Module:
    model = nn.Linear(6, 6)
    nn.init.orthogonal_(model.weight)
    return model


def transposed() -> nn.Module:
    model = nn.Linear(6, 6)
    with torch.no_grad():
        model.weight.t().normal_()
    return model


def reads_its_weights() -> nn.Module:
    model = nn.Linear(6, 6)
    assert model.weight.abs().max().item() > 0
    return model


def catches_the_error() -> nn.Module:
    model = nn.Linear(6, 6)
    try:
        nn.init.orthogonal_(model.weight)
    except Exception:
        nn.init.eye_(model.bias[None])
    return model


def plain_attribute() -> nn.Module:
    model = nn.Linear(6, 6)
    model.frequencies = torch.rand(6)
    return model


def drawn_otherwise() -> nn.Module:
    model = nn.Linear(6, 6)
    model.register_buffer("order", torch.randperm(6))
    return model


def asks_for_the_device() -> nn.Module:
    model = nn.Linear(6, 6)
    model.register_buffer("mask", torch.ones(6, device=model.weight.device))
    return model


AS_IT_IS: dict[str, Callable[[], nn.Module]] = {
    "random buffer": build,
    "orthogonal": orthogonal,
    "truncated normal": lambda: with_parameter(lambda: nn.init.trunc_normal_(torch.empty(6, 6))),
    "transposed": transposed,
    "padding row": lambda: nn.Embedding(9, 4, padding_idx=2),
    "read": reads_its_weights,
    "caught": catches_the_error,
    "attribute": plain_attribute,
    "permutation": drawn_otherwise,
    "sparse": lambda: with_parameter(lambda: nn.init.sparse_(torch.empty(6, 6), 0.5)),
    "identity": lambda: with_parameter(lambda: nn.init.eye_(torch.empty(6, 6))),
    "device": asks_for_the_device,
    "no value": lambda: with_parameter(lambda: torch.empty(6, 6)),
    "copied from": lambda: with_parameter(lambda: torch.empty(6, 6).copy_(torch.eye(6))),
}


@pytest.mark.parametrize("factory", AS_IT_IS)
def test_what_cannot_be_replayed_is_built_as_it_is(factory: str) -> None:
    assert build_deferred(AS_IT_IS[factory]) is None


def test_values_that_are_there_stay() -> None:
    found = replayed(lambda: with_parameter(lambda: torch.eye(6)))
    assert torch.equal(found["weight"], torch.eye(6))
    assert found["bias"].isfinite().all()
