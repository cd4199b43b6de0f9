"""Norms of queries' and keys' heads (Qwen3): equal on every mesh, counted by the estimate, read and
written under the family's names.
"""

from typing import Any

import pytest
import torch

from tests.costmodel.test_against_rehearsal import small, traffic
from tests.interop.test_megatron_arguments import read
from tests.parallel.small import LLAMA, plan
from tests.plan.test_catalog import LLAMA as CONFIG
from workbench import interop
from workbench.checkpoint.huggingface.huggingface_names import config_json, stored_parts
from workbench.engine.verify import equivalence
from workbench.engine.verify.equivalence import verify
from workbench.models import Transformer
from workbench.parallel.expert import apply_expert
from workbench.plan.catalog.families.table import family_of
from workbench.plan.catalog.huggingface_config import shape_of
from workbench.plan.model.model_shape import Shape
from workbench.plan.model.parameter_count import parameters
from workbench.plan.rules.supported import unsupported
from workbench.plan.schema import Plan
from workbench.planner import estimate
from workbench.rehearsal.rehearse import rehearse

NORMED = {**LLAMA, "qk_norm": "head"}
UNEVEN = {**NORMED, "heads": 6, "kv_heads": 3, "head_dim": 6, "ffn": 45}
CONTEXT = {"cluster.gpus": 2, "strategy.context.size": 2}


@pytest.mark.parametrize(
    "shape, mesh, changes",
    [
        (NORMED, (2, 1, 1), {}),
        (UNEVEN, (2, 1, 2), {"strategy.tensor.sequence": True, "strategy.data.zero": 3}),
        (NORMED, (1, 2, 2), {"strategy.pipeline.schedule": "zb-h1", "strategy.data.zero": 1}),
        (NORMED, (1, 1, 1), CONTEXT),
        (NORMED, (1, 1, 1), {**CONTEXT, "strategy.context.algorithm": "ulysses"}),
    ],
)
def test_meshes_equal_one_device(
    shape: dict[str, Any], mesh: tuple[int, int, int], changes: dict[str, Any]
) -> None:
    assert verify(plan(*mesh, shape=shape, changes=changes))["passed"]


@pytest.mark.slow
def test_key_heads_that_ranks_share_are_normed_once() -> None:
    assert verify(plan(4, shape=NORMED))["passed"]


def test_a_gradient_of_one_ranks_heads_alone_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apply_expert, "PARTIAL_GRADIENTS", (".route.weight",))
    answer = equivalence.verify(plan(2, shape=NORMED))
    assert not answer["passed"] and "_norm.weight" in answer["worst"]["tensor"]


@pytest.mark.parametrize("strategy, gpus", [("tensor-pipeline", 4), ("zero-3", 2)])
def test_the_estimate_is_the_rehearsal(strategy: str, gpus: int) -> None:
    model = {"layers": 4, "hidden": 128, "heads": 8, "kv_heads": 4, "ffn": 160, "vocab": 512}
    made = small({**model, "head_dim": 32, "qk_norm": "head"}, strategy, gpus, "bf16")
    estimated, rehearsed = estimate(made), rehearse(made)
    assert estimated.peak_bytes_by_rank == pytest.approx(rehearsed.peak_bytes_by_rank, rel=0.005)
    assert traffic(estimated) == traffic(rehearsed)


def test_they_are_counted_and_cost_time() -> None:
    shape = Shape.model_validate(NORMED)
    with torch.device("meta"):
        built = Transformer(shape)
    assert parameters(shape).total == sum(p.numel() for p in built.parameters())
    plain, normed = (
        estimate(Plan.of("qwen3-8b", gpu="h100-sxm-80gb", gpus=8, strategy="zero-3", set=changes))
        for changes in ({"model.qk_norm": None}, {})
    )
    assert 1 < float(normed.step_seconds or 0) / float(plain.step_seconds or 1) < 1.1


@pytest.mark.parametrize(
    "changes",
    [
        {"strategy.tensor": {"size": [2, 2], "algorithm": "2d"}},
        {"strategy.tensor.size": 4, "strategy.operators": {"blocks.*.mlp.up": "((1,1),(1,4))"}},
    ],
)
def test_grids_and_operators_are_refused_by_field(changes: dict[str, Any]) -> None:
    made = plan(shape=NORMED, changes={"cluster.gpus": 4, **changes}).resolve()
    for verb in ("rehearse", "run"):
        assert "model.qk_norm" in [problem.field for problem in unsupported(made, verb)]


def test_qwen3_is_read_and_written() -> None:
    shape = shape_of({**CONFIG, "model_type": "qwen3", "head_dim": 128})
    assert (shape.qk_norm, shape.biases, shape.unmodelled) == ("head", "none", None)
    assert shape_of(config_json(shape, torch.float32)) == shape
    (part,) = stored_parts(family_of(shape), shape)["blocks.3.attention.q_norm.weight"]
    assert part.key == "model.layers.3.self_attn.q_norm.weight"


def test_megatrons_flag_is_read_and_written() -> None:
    found = read("--train-iters 10 --normalization RMSNorm --qk-layernorm")
    assert found.plan.resolve().shape.qk_norm == "head"
    assert "--qk-layernorm" in interop.write(found.plan, "megatron").text
