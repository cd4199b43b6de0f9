"""Fields of a plan that the pairwise sweep does not vary leave collectives in flight alone too."""

from typing import Any

import pytest

from tests.parallel.small import GPT, LLAMA, plan
from tests.parallel.sweep import MOE
from tests.parallel.test_operators import GRID, MIXED, ROWS, megatron
from tests.sanitizer.sanitized_ranks import Transport, violations
from workbench.plan.schema import Plan


def on(
    *mesh: int, shape: dict[str, Any] = LLAMA, more: dict[str, Any] | None = None, **strategy: Any
) -> Plan:
    """A short plan; `strategy` by field of its section, `more` by dotted path."""
    changes = {
        f"strategy.{section}.{field}": value
        for section, fields in strategy.items()
        for field, value in fields.items()
    }
    return plan(*mesh, shape=shape, layers=4, microbatches=2, changes={**changes, **(more or {})})


def in_flight(number: int, **data: Any) -> Plan:
    return on(1, 1, 2, data={"in_flight": number, **data})


def in_precision(precision: str, **more: Any) -> Plan:
    return on(1, 1, 2, more={"strategy.precision": precision}, **more)


def by_operators(*mesh: int, operators: dict[str, str], **more: Any) -> Plan:
    return on(*mesh, more={"strategy.operators": operators}, **more)


PARALLEL = {"tensor": {"sequence": True}}
PLANS = {
    "zero-3, 1 in flight": in_flight(1, zero=3),
    "zero-3, 3 in flight": in_flight(3, zero=3),
    "zero-3, 6 in flight, by microbatch": in_flight(6, zero=3, reduce="microbatch"),
    "zero-2, 1 in flight, by microbatch": in_flight(1, zero=2, reduce="microbatch"),
    "zero-2, 4 in flight, by microbatch": in_flight(4, zero=2, reduce="microbatch"),
    "bf16, ddp": in_precision("bf16"),
    "bf16, zero-3, by microbatch": in_precision("bf16", data={"zero": 3, "reduce": "microbatch"}),
    "fp16, zero-1": in_precision("fp16", data={"zero": 1}),
    "bf16, zero-1, bf16 gradients": on(
        *(1, 1, 2),
        more={"strategy.precision": "bf16", "strategy.gradient_dtype": "parameters"},
        data={"zero": 1},
    ),
    "bf16, zero-2, optimizer offloaded": in_precision(
        "bf16", data={"zero": 2, "offload": "optimizer"}
    ),
    "bf16, ring": on(more={"strategy.precision": "bf16", "cluster.gpus": 4}, context={"size": 4}),
    "dropout, sequence, 1f1b": on(2, 2, 1, more={"training.dropout": 0.2}, **PARALLEL),
    "tied stages, zero-1": plan(
        1, 2, 2, tied=True, microbatches=2, changes={"strategy.data.zero": 1}
    ),
    "experts, hybrid zero-2": on(
        *(1, 1, 4), shape=MOE, expert={"size": 2}, data={"zero": 2, "shard": 2}
    ),
    "operators": by_operators(2, 1, 2, operators=megatron(2), data={"zero": 3}),
    "operators by rows": by_operators(2, operators=ROWS, shape=GPT),
    "operators on a grid": by_operators(4, operators=GRID, shape=GPT),
    "operators on a grid, mixed": by_operators(4, operators=MIXED, shape=GPT),
    "operators, zb-h1": by_operators(
        2, 2, 1, operators=megatron(2), pipeline={"schedule": "zb-h1"}
    ),
}


@pytest.mark.slow
@pytest.mark.drawn(7)
@pytest.mark.parametrize("transport", ["nccl", pytest.param("gloo", marks=pytest.mark.sweep)])
@pytest.mark.parametrize("name", PLANS)
def test_collectives_in_flight_are_left_alone(name: str, transport: Transport) -> None:
    assert not "\n".join(map(str, violations(PLANS[name], transport)))
