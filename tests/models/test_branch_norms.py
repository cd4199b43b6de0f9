"""Norms at the output of branches, norms that multiply by 1 + weight, and scaled embeddings (Gemma
2), norms of all query and key heads (OLMo 2): equal on every mesh, counted by the estimate,
refused by field where they do not run.
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
from workbench.models.weight_init import WeightInit
from workbench.plan.model.model_shape import Shape
from workbench.plan.model.parameter_count import parameters
from workbench.plan.rules.supported import unsupported
from workbench.plan.schema import Plan
from workbench.planner import estimate
from workbench.rehearsal.rehearse import rehearse

BOTH = {**LLAMA, "branch_norms": "both", "zero_centered_norms": True, "embedding_scale": 4.7}
WINDOWED = {**BOTH, "qk_norm": "head", "window": 24, "full_attention_every": 2}
WINDOWED |= {"window_rope_theta": 300.0, "rope_theta": 1e5}
OUTPUT = {**LLAMA, "branch_norms": "output", "qk_norm": "width"}


@pytest.mark.parametrize(
    ("shape", "mesh", "changes"),
    [
        (BOTH, (2, 1, 1), {"strategy.tensor.sequence": True}),
        (OUTPUT, (1, 2, 2), {"strategy.pipeline.schedule": "zb-h1", "strategy.data.zero": 1}),
        (BOTH, (1, 1, 2), {"strategy.recompute": "full", "strategy.data.zero": 3}),
    ],
)
def test_meshes_equal_one_device(
    shape: dict[str, Any], mesh: tuple[int, int, int], changes: dict[str, Any]
) -> None:
    assert verify(plan(*mesh, shape=shape, changes=changes))["passed"]


@pytest.mark.parametrize("shape", [BOTH, OUTPUT])
def test_branches_end_with_a_norm(shape: dict[str, Any]) -> None:
    made = Shape.model_validate(shape)
    block = Block(made, 0, 0.0, 0).double()
    for value in block.parameters():
        torch.nn.init.normal_(value, 0.5, 0.3)
    positions = Transformer(made).double().positions(torch.zeros(1, 5))
    x = torch.randn(2, 5, made.hidden, dtype=torch.float64)
    branch, residual, _ = block(x, None, positions)

    def normed(norm: AddNorm | None, x: torch.Tensor) -> torch.Tensor:
        if norm is None:
            return x
        weight = norm.weight + 1 if made.zero_centered_norms else norm.weight
        return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, norm.epsilon)

    attended = block.attention(normed(block.attention_norm, x), positions)
    after = x + normed(block.attention_output_norm, attended)
    torch.testing.assert_close(residual, after)
    fed = block.mlp(normed(block.mlp_norm, after))
    torch.testing.assert_close(branch, normed(block.mlp_output_norm, fed))


def test_gradients_of_a_norm_that_multiplies_by_one_more() -> None:
    norm = AddNorm("rmsnorm", 6, 1e-5, bias=False, zero_centered=True).double()
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(3, 4, 6, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(lambda x, _: norm(x, None)[0], (x, norm.weight))
    narrow = norm.bfloat16()
    wide = x.detach().bfloat16().float()
    unit = torch.nn.functional.rms_norm(wide, (6,), 1 + narrow.weight.float(), 1e-5)
    assert torch.equal(narrow(x.detach().bfloat16(), None)[0], unit.bfloat16())


def test_embedded_tokens_are_multiplied() -> None:
    made = Shape.model_validate(BOTH)
    model = Transformer(made)
    assert model.embedding is not None
    torch.nn.init.normal_(model.embedding.tokens.weight)
    tokens = torch.arange(6)[None]
    found = model.embedding(tokens, model.positions(tokens))
    torch.testing.assert_close(found, model.embedding.tokens.weight[None, :6] * 4.7)


def test_norms_of_such_a_model_begin_at_zero() -> None:
    value = torch.full((4,), 7.0)
    init = WeightInit(2, 0, drawer=None, norm_weight=0.0)
    init.fill(value, [(0, 4)], "blocks.0.mlp_output_norm.weight", [4])
    assert value.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("kernels", ["fused", "compiled"])
def test_kernels_leave_norms_that_multiply_by_one_more_alone(kernels: str) -> None:
    for shape, expected in ((BOTH, "AddNorm"), (OUTPUT, "FusedAddNorm")):
        block = Block(Shape.model_validate(shape), 0, 0.0, 0)
        replace_seams(block, kernels, "cuda")
        assert type(block.mlp_output_norm).__name__ == expected


def test_layers_with_a_window_rotate_by_their_own_base() -> None:
    made = Shape.model_validate(WINDOWED)
    tokens = torch.arange(40)[None]
    model = Transformer(made).double()
    for value in model.parameters():
        torch.nn.init.normal_(value, 0.1, 0.3)
    positions = model.positions(tokens)
    alone = made.model_copy(update={"window_rope_theta": None, "rope_theta": 300.0})
    local = Transformer(alone).double().positions(tokens)
    assert positions.window is not None
    assert torch.equal(positions.window[0], local.cos)
    assert not torch.equal(positions.cos, local.cos)
    x = torch.randn(1, 40, made.hidden, dtype=torch.float64)
    windowed, full = (block.attention for block in list(model.blocks.values())[:2])
    assert torch.equal(windowed(x, positions), windowed(x, local._replace(window=None)))
    assert torch.equal(full(x, positions), full(x, positions._replace(window=None)))


@pytest.mark.parametrize("shape", [BOTH, OUTPUT, WINDOWED])
@pytest.mark.parametrize(
    ("strategy", "gpus", "changes"),
    [
        ("tensor-pipeline", 4, {}),
        ("tensor-pipeline", 4, {"strategy.tensor.sequence": True}),
        ("tensor-pipeline", 4, {"strategy.recompute": "full"}),
        ("zero-3", 2, {}),
    ],
    ids=str,
)
def test_the_estimate_is_the_rehearsal(
    shape: dict[str, Any], strategy: str, gpus: int, changes: dict[str, Any]
) -> None:
    wide = {"layers": 4, "hidden": 128, "heads": 8, "kv_heads": 8, "ffn": 160, "vocab": 512}
    made = small({**shape, **wide}, strategy, gpus, "bf16").replace(**changes)
    estimated, rehearsed = estimate(made), rehearse(made)
    assert estimated.peak_bytes_by_rank == pytest.approx(rehearsed.peak_bytes_by_rank, rel=0.005)
    assert traffic(estimated) == traffic(rehearsed)


@pytest.mark.parametrize("shape", [BOTH, OUTPUT])
def test_parameters_are_counted(shape: dict[str, Any]) -> None:
    made = Shape.model_validate(shape)
    with torch.device("meta"):
        built = Transformer(made)
    assert parameters(made).total == sum(p.numel() for p in built.parameters())


@pytest.mark.parametrize("field", ["branch_norms", "zero_centered_norms", "embedding_scale"])
@pytest.mark.parametrize(
    "changes",
    [
        {"strategy.tensor": {"size": [2, 2], "algorithm": "2d"}},
        {"strategy.tensor.size": 4, "strategy.operators": {"blocks.*.mlp.up": "((1,1),(1,4))"}},
    ],
)
def test_grids_and_operators_are_refused_by_field(field: str, changes: dict[str, Any]) -> None:
    made = plan(shape={**LLAMA, field: BOTH[field]}, changes={"cluster.gpus": 4, **changes})
    for verb in ("rehearse", "run"):
        found = unsupported(made.resolve(), verb)
        assert [problem.field for problem in found] == [f"model.{field}"]


def test_heads_that_several_ranks_would_norm_are_refused() -> None:
    with pytest.raises(PlanError, match=r"model\.qk_norm: .*4 tensor ranks.*size up to 2"):
        plan(4, 1, 1, shape=OUTPUT).resolve()


@pytest.mark.parametrize(
    "changes",
    [
        {"zero_centered_norms": True, "norm": "layernorm"},
        {"branch_norms": "both", "parallel_residual": "two_norms"},
        {"window_rope_theta": 1e4},
    ],
)
def test_norms_that_no_model_has_are_refused(changes: dict[str, Any]) -> None:
    written = {"model": {**LLAMA, **changes}, "cluster": {"gpu": "local", "gpus": 1}}
    with pytest.raises(PlanError, match=rf"model\.{next(iter(changes))}.*legal: null"):
        Plan.model_validate(written).resolve()
