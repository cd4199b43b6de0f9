"""Layers whose branches both read the input (GPT-NeoX, Falcon), and heads that are rotated in part:
equal on every mesh, counted by the estimate, refused by field where they do not run.
"""

from typing import Any

import pytest
import torch

from tests.costmodel.test_against_rehearsal import small, traffic
from tests.parallel.small import LLAMA, plan
from workbench.engine.verify.equivalence import verify
from workbench.errors import PlanError
from workbench.kernels.fused_seams import replace_seams
from workbench.models import Transformer
from workbench.models.block import Block
from workbench.models.seams import AddNorm
from workbench.plan.catalog.huggingface_config import shape_of
from workbench.plan.model.model_shape import Shape
from workbench.plan.model.parameter_count import parameters
from workbench.plan.rules.supported import unsupported
from workbench.plan.schema import Plan
from workbench.planner import estimate
from workbench.rehearsal.rehearse import rehearse

GPT = {"norm": "layernorm", "mlp": "gelu_exact", "biases": "all"}
NEOX = {**LLAMA, **GPT, "kv_heads": LLAMA["heads"], "parallel_residual": "two_norms"}
NEOX["rotary_dim"] = 2
FALCON = {**LLAMA, "norm": "layernorm", "kv_heads": 1, "parallel_residual": "one_norm"}
SHARED = {**LLAMA, "kv_heads": LLAMA["heads"], "parallel_residual": "one_norm"}
MIXTURE = {**LLAMA, "parallel_residual": "two_norms", "moe": {"experts": 4, "top_k": 2, "ffn": 12}}


@pytest.mark.parametrize(
    ("shape", "mesh", "changes"),
    [
        (NEOX, (2, 1, 1), {"strategy.tensor.sequence": True}),
        (FALCON, (1, 2, 2), {"strategy.pipeline.schedule": "zb-h1", "strategy.data.zero": 1}),
        (FALCON, (2, 1, 1), {"strategy.recompute": "full"}),
        (MIXTURE, (1, 1, 2), {"strategy.expert.size": 2}),
    ],
)
def test_meshes_equal_one_device(
    shape: dict[str, Any], mesh: tuple[int, int, int], changes: dict[str, Any]
) -> None:
    assert verify(plan(*mesh, shape=shape, changes=changes))["passed"]


def test_both_branches_read_the_layers_input() -> None:
    shape = Shape.model_validate(NEOX)
    block = Block(shape, 0, 0.0, 0).double()
    for name, value in block.named_parameters():
        torch.nn.init.normal_(value, 1.0 if "norm.weight" in name else 0.0, 0.3)
    positions = Transformer(shape).double().positions(torch.zeros(1, 5))
    x = torch.randn(2, 5, shape.hidden, dtype=torch.float64)
    branch, residual, _ = block(x, None, positions)

    def normed(norm: AddNorm) -> torch.Tensor:
        return torch.nn.functional.layer_norm(x, x.shape[-1:], norm.weight, norm.bias, norm.epsilon)

    assert block.mlp_norm is not None
    attended = block.attention(normed(block.attention_norm), positions)
    torch.testing.assert_close(branch, attended + block.mlp(normed(block.mlp_norm)))
    assert torch.equal(residual, x)


@pytest.mark.parametrize("kernels", ["fused", "compiled"])
def test_kernels_leave_partial_rotation_and_exact_gelu_alone(kernels: str) -> None:
    block = Block(Shape.model_validate(NEOX), 0, 0.0, 0)
    replace_seams(block, kernels, "cuda")
    assert type(block.attention.rope).__name__ == "PartialRope"
    assert type(block.mlp.activate).__name__ == "Activate"
    assert type(block.attention_norm).__name__ == "FusedAddNorm"


@pytest.mark.parametrize(
    ("shape", "strategy", "gpus"),
    [(NEOX, "zero-3", 2), *((it, "tensor-pipeline", 4) for it in (NEOX, FALCON, SHARED))],
)
def test_the_estimate_is_the_rehearsal(shape: dict[str, Any], strategy: str, gpus: int) -> None:
    wide = {"layers": 4, "hidden": 128, "heads": 8, "ffn": 160, "vocab": 512}
    wide["kv_heads"] = 1 if shape is FALCON else 8
    made = small({**shape, **wide}, strategy, gpus, "bf16")
    estimated, rehearsed = estimate(made), rehearse(made)
    assert estimated.peak_bytes_by_rank == pytest.approx(rehearsed.peak_bytes_by_rank, rel=0.005)
    assert traffic(estimated) == traffic(rehearsed)


@pytest.mark.parametrize("shape", [NEOX, FALCON, MIXTURE])
def test_parameters_are_counted(shape: dict[str, Any]) -> None:
    made = Shape.model_validate(shape)
    with torch.device("meta"):
        built = Transformer(made)
    assert parameters(made).total == sum(p.numel() for p in built.parameters())


@pytest.mark.parametrize("field", ["parallel_residual", "rotary_dim"])
@pytest.mark.parametrize(
    "changes",
    [
        {"strategy.tensor": {"size": [2, 2], "algorithm": "2d"}},
        {"strategy.tensor.size": 4, "strategy.operators": {"blocks.*.mlp.up": "((1,1),(1,4))"}},
    ],
)
def test_grids_and_operators_are_refused_by_field(field: str, changes: dict[str, Any]) -> None:
    model = {**LLAMA, field: NEOX[field]}
    made = plan(shape=model, changes={"cluster.gpus": 4, **changes}).resolve()
    for verb in ("rehearse", "run"):
        assert [problem.field for problem in unsupported(made, verb)] == [f"model.{field}"]


@pytest.mark.parametrize(
    ("changes", "legal"),
    [
        ({"rotary_dim": 3}, "legal: 2"),
        ({"rotary_dim": 1000}, "legal: "),
        ({"rotary_dim": 2, "positions": "alibi"}, "legal: null"),
    ],
)
def test_what_cannot_be_rotated_is_refused(changes: dict[str, Any], legal: str) -> None:
    written = {"model": {**LLAMA, **changes}, "cluster": {"gpu": "local", "gpus": 1}}
    with pytest.raises(PlanError, match=r"model\.rotary_dim") as error:
        Plan.model_validate(written).resolve()
    assert legal in str(error.value)


def test_configurations_say_the_order_of_branches() -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 9}
    neox = {**sizes, "model_type": "gpt_neox", "intermediate_size": 64}
    falcon = {**sizes, "model_type": "falcon"}
    found = [
        shape_of(config)
        for config in (
            neox,
            {**neox, "use_parallel_residual": False, "rotary_pct": 1},
            falcon,
            {**falcon, "parallel_attn": False, "multi_query": False},
            {**falcon, "new_decoder_architecture": True, "num_kv_heads": 2},
        )
    ]
    assert [
        (it.parallel_residual, it.kv_heads, it.rotary_dim, it.mlp, it.unmodelled) for it in found
    ] == [
        ("two_norms", 4, 2, "gelu_exact", None),
        (None, 4, None, "gelu_exact", None),
        ("one_norm", 1, None, "gelu_exact", None),
        (None, 4, None, "gelu_exact", None),
        ("two_norms", 2, None, "gelu_exact", None),
    ]
