"""Experts that fewer tensor ranks split than a layer (Megatron-core's
--expert-tensor-parallel-size), and the links of their all-to-all.
"""

from __future__ import annotations

from typing import Any

import pytest

from workbench.costmodel.communication.collective_cost import axis_links
from workbench.costmodel.communication.collective_volume import step_collectives
from workbench.costmodel.compute.roofline import model_flops
from workbench.costmodel.inputs.layer_gemms import layer_gemms
from workbench.costmodel.inputs.rank_workload import Workload, workload
from workbench.costmodel.memory.model_states import model_states
from workbench.costmodel.rates.constants import constants
from workbench.errors import PlanError
from workbench.plan.rules.supported import unsupported
from workbench.plan.schema import Plan

HIDDEN, EXPERT = 4096, 14336
EXPERT_PARAMETERS = 3 * HIDDEN * EXPERT


def planned(**more: Any) -> Plan:
    set = {
        "strategy.stack": "megatron",
        "strategy.tensor.size": 2,
        "strategy.tensor.sequence": True,
        "strategy.expert.size": 8,
        "training.sequence_length": 4096,
        "training.micro_batch": 1,
        "training.global_batch": 64,
    }
    by_path = {f"strategy.{name.replace('__', '.')}": value for name, value in more.items()}
    gpus = by_path.pop("strategy.gpus", 32)
    return Plan.of(
        "mixtral-8x7b", gpu="h100-sxm-80gb", gpus=gpus, strategy="ddp", set=set | by_path
    )


def load(**more: Any) -> Workload:
    return workload(planned(**more).resolve())


def test_whole_experts_have_half_the_rows_and_all_the_width() -> None:
    split, whole = load(), load(expert__tensor=1)
    expert = [next(g for g in layer_gemms(w, True) if not g.ungrouped) for w in (split, whole)]
    assert expert[1].rows == expert[0].rows / 2 == 4096 * 2 / 2 / 1
    assert (expert[0].columns, expert[1].columns) == (EXPERT, 2 * EXPERT)  # gate and up are one
    assert float(model_flops(whole)) == float(model_flops(split))


def test_each_rank_holds_whole_experts_and_shares_their_states_with_more_ranks() -> None:
    """Mixtral's 8 experts over 8 of 32 ranks: one each, repeated 4 times, in place of a half one
    repeated twice.
    """
    split, whole = load(data__zero=1), load(data__zero=1, expert__tensor=1)
    layers = 32
    assert float(split.param_counts.experts[0]) == layers * EXPERT_PARAMETERS / 2
    assert float(whole.param_counts.experts[0]) == layers * EXPERT_PARAMETERS
    dense = [w.param_counts.dense / w.searched.shard for w in (split, whole)]
    states = [
        model_states(w, w.param_counts).optimizer / w.fixed.moment_bytes - own
        for w, own in zip((split, whole), dense)
    ]
    assert float(states[0][0]) == pytest.approx(layers * EXPERT_PARAMETERS / 2 / 2)
    assert float(states[1][0]) == pytest.approx(layers * EXPERT_PARAMETERS / 4)
    groups = {
        float(call.group_size)
        for call in step_collectives(whole)
        if call.axis == "data" and call.kind == "reduce_scatter"
    }
    assert groups == {16.0, 4.0}


def test_tokens_of_a_sequence_parallel_rank_are_sent_once() -> None:
    """Every rank sends its own half of the tokens, which the MoE gathers no more."""
    split, whole = load(), load(expert__tensor=1)
    sent, gathered = (
        [
            sum(
                float(call.bytes * call.count)
                for call in step_collectives(w)
                if (call.axis, call.kind, call.dtype) == wanted
            )
            for w in (split, whole)
        ]
        for wanted in (("expert", "all_to_all", "bf16"), ("tensor", "all_gather", "bf16"))
    )
    assert sent[1] == sent[0] / 2
    each = float(whole.hidden_activation_bytes * whole.microbatches) * 32
    assert gathered[0] - gathered[1] == pytest.approx(2 * each)


@pytest.mark.parametrize(
    ("more", "inside"),
    [
        ({"expert__size": 8, "tensor__size": 1, "gpus": 64}, True),
        ({"expert__size": 4, "tensor__size": 2, "gpus": 64}, True),
        ({"expert__size": 8, "tensor__size": 2, "gpus": 64}, False),
        ({"expert__size": 8, "tensor__size": 2, "expert__tensor": 1, "gpus": 64}, True),
        ({"expert__size": 8, "context__size": 4, "tensor__size": 1, "gpus": 64}, True),
    ],
)
def test_an_all_to_all_of_neighbors_stays_in_its_node(more: dict[str, Any], inside: bool) -> None:
    """Experts lie on neighboring ranks (`parallel/mesh.py`), whatever the replicas beyond them."""
    if more["tensor__size"] == 1:
        more = {**more, "tensor__sequence": False}
    w = load(**more)
    k = constants(w.fixed.gpu, w.fixed.kernels, w.fixed.stack)
    links = axis_links(w, k)
    within = w.fixed.gpu.link_gbs * 1e9 * k.link_share
    assert (float(links["expert"].bandwidth) == within) is inside
    assert float(links["data"].bandwidth) < within


def test_what_is_legal_is_said() -> None:
    with pytest.raises(PlanError, match=r"expert.tensor: is 3 with 1d .* of 2 .*legal: 1, 2"):
        planned(expert__tensor=3).resolve()
    with pytest.raises(PlanError, match=r"data x context = 4; legal: .*4"):
        planned(gpus=8).resolve()
    assert planned(gpus=8, expert__tensor=1).resolve().strategy.expert.size == 8
    own = planned(expert__tensor=1, stack="workbench").resolve()
    assert "strategy.expert.tensor" in [problem.field for problem in unsupported(own, "run")]
