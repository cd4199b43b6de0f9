"""Layers that predict further tokens (DeepSeek-V3, arXiv 2412.19437, section 2.2)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from workbench.costmodel.communication.collective_volume import step_collectives
from workbench.costmodel.compute.kernel_rates import device_rates
from workbench.costmodel.compute.roofline import head_pass, model_flops
from workbench.costmodel.inputs.rank_workload import Workload, workload
from workbench.costmodel.memory.live_sets.live_by_phase import live_by_phase
from workbench.costmodel.rates.constants import constants
from workbench.errors import PlanError
from workbench.plan.catalog import catalog
from workbench.plan.model.model_shape import Shape, shape_from
from workbench.plan.model.parameter_count import parameters
from workbench.plan.rules.supported import unsupported
from workbench.plan.schema import Plan

HIDDEN, VOCAB = 7168, 129280


def deepseek(further: int) -> Shape:
    """DeepSeek-V3 with so many layers more than its 61."""
    shape = catalog.models()["deepseek-v3"].shape
    written = shape.model_dump() | {"layers": 61 + further, "mtp_layers": further}
    return shape_from(written)


def planned(further: int, **more: Any) -> Plan:
    set: dict[str, Any] = {
        "model": deepseek(further).model_dump(),
        "strategy.stack": "megatron",
        "strategy.expert.size": 8,
        "training.sequence_length": 4096,
        "training.micro_batch": 1,
        "training.global_batch": 64,
    }
    return Plan.of("tiny", gpu="h100-sxm-80gb", gpus=64, strategy="ddp", set=set | more)


def load(further: int, **more: Any) -> Workload:
    return workload(planned(further, **more).resolve())


def test_parameters_are_those_that_deepseek_prints() -> None:
    """README_WEIGHTS.md of DeepSeek-V3: 11.5B parameters beside the shared embedding and head;
    2.4B that a token meets, with 0.9B of each of them.
    """
    one, two = (parameters(deepseek(further)) for further in (0, 1))
    assert two.total - one.total == pytest.approx(11.5e9, rel=0.015)
    tables = 2 * HIDDEN * VOCAB
    assert two.active - one.active + tables == pytest.approx(2.4e9, rel=0.06)
    assert two.prediction == 2 * HIDDEN**2 + 3 * HIDDEN and one.prediction == 0


def test_the_last_stage_computes_the_head_again() -> None:
    """FLOPs of a further block, of the head once more, and of the projection; forward once,
    backward twice.
    """
    one, two = load(0), load(1)
    block = deepseek(1).model_copy(update={"mtp_layers": 0})
    plain = workload(planned(1, model=block.model_dump()).resolve())
    added = model_flops(two) - model_flops(plain)
    tokens = two.tokens * two.data
    assert float(added) == pytest.approx(float(3 * 2 * tokens * (HIDDEN * VOCAB + 2 * HIDDEN**2)))
    m = device_rates(two.fixed.gpu, "bf16", constants(two.fixed.gpu, "fused", "megatron"))
    once, twice = (float(head_pass(w, m).forward) for w in (one, two))
    assert 2 * once < twice < 2.3 * once


def test_the_last_stage_keeps_a_table_and_both_losses() -> None:
    """Megatron-core looks further embeddings up on the last stage, in a table of its own; under
    1F1B its last rank holds one microbatch.
    """
    pipelined = {"strategy.pipeline.size": 4, "strategy.pipeline.partition": [16, 16, 16, 14]}
    block = deepseek(1).model_copy(update={"mtp_layers": 0}).model_dump()
    plain, two = load(1, model=block, **pipelined), load(1, **pipelined)
    added = two.param_counts.total - plain.param_counts.total
    own = 2 * HIDDEN**2 + 3 * HIDDEN + HIDDEN * VOCAB
    assert added.tolist() == pytest.approx([0, 0, 0, own])
    losses = [live_by_phase(w)["loss"]["logits"] for w in (plain, two)]
    assert losses[1][-1] == 2 * losses[0][-1] > 0 and losses[1][0] == 0


def test_vocabulary_parallel_losses_reduce_twice() -> None:
    calls = {
        further: sum(
            float((call.count + two_tensor.zeros)[-1])
            for call in step_collectives(two_tensor)
            if (call.axis, call.kind, call.dtype) == ("tensor", "all_reduce", "fp32")
            and call.action != "REDUCE_GRAD"  # sums of the router's and biases' gradients
        )
        for further in (0, 1)
        for two_tensor in (load(further, **{"strategy.tensor.size": 2}),)
    }
    assert calls[1] == 2 * calls[0] > 0


def test_not_all_layers_can_be_further_ones_and_the_engine_has_none() -> None:
    with pytest.raises(PlanError, match=r"model.mtp_layers: is 61 of 61 layers; legal: 0 to 60"):
        planned(0, model=replace_layers(61)).resolve()
    own = planned(1, **{"strategy.stack": "workbench"}).resolve()
    assert "model.mtp_layers" in [problem.field for problem in unsupported(own, "run")]


def replace_layers(further: int) -> dict[str, Any]:
    return deepseek(0).model_dump() | {"mtp_layers": further}


def test_dense_models_have_them_too() -> None:
    w = load(
        1,
        model=catalog.models()["llama-3-8b"].shape.model_dump() | {"mtp_layers": 1},
        **{"strategy.expert.size": 1},
    )
    without = replace(w, fixed=replace(w.fixed, shape=w.shape.model_copy(update={"mtp_layers": 0})))
    assert float(model_flops(w)) > float(model_flops(without))
