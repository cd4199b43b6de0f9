"""A window, ALiBi and soft-caps equal one device under every axis, and faults in them are found.

The one device keeps all scores (math); ranks run tiles of five queries.
"""

from dataclasses import replace
from typing import Any

import pytest

from tests.parallel.operator_strategies import columns_before_rows
from tests.parallel.small import GPT, LLAMA, plan
from tests.parallel.test_context import context_plan
from tests.parallel.test_equality import assert_equal_to_one_device
from tests.parallel.test_mutations import failure_of
from workbench.engine.verify.equivalence import verify
from workbench.errors import PlanError
from workbench.models import Transformer
from workbench.models.attention import blockwise_attention
from workbench.models.attention.score_rule import ScoreRule
from workbench.models.seams import Attend
from workbench.parallel import apply_strategy
from workbench.parallel.context import blockwise_ring
from workbench.parallel.mesh import Mesh
from workbench.plan.rules.supported import unsupported

MISTRAL = {**LLAMA, "window": 6}
ALTERNATING = {**LLAMA, "window": 3, "full_attention_every": 2}
BLOOM = {
    **GPT,
    "positions": "alibi",
    "heads": 6,
    "hidden": 48,
    "embedding_norm": True,
    "tied": True,
}
GEMMA = {
    **{**ALTERNATING, "tied": True, "mlp": "geglu"},
    **{"attention_softcap": 0.8, "logit_softcap": 1.2, "attention_scale": 0.3},
}
SHAPES = {"mistral": MISTRAL, "alternating": ALTERNATING, "bloom": BLOOM, "gemma": GEMMA}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blockwise_attention, "TILE_QUERIES", 5)


AXES: dict[str, Any] = {
    "tensor and sequence": lambda shape: plan(
        2, shape=shape, changes={"strategy.tensor.sequence": True}
    ),
    "pipeline": lambda shape: plan(1, 2, shape=shape),
    "ring": lambda shape: context_plan(2, "ring", shape=shape),
    "ulysses": lambda shape: context_plan(2, "ulysses", shape=shape),
    "zero-3": lambda shape: plan(
        data=2, shape=shape, changes={"strategy.data.zero": 3, "strategy.recompute": "selective"}
    ),
}


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("name", ["mistral", "bloom", "gemma"])
def test_a_family_equals_one_device(name: str, axis: str) -> None:
    assert_equal_to_one_device(verify(AXES[axis](SHAPES[name]), "fp64"))


MESHES: dict[str, Any] = {
    "uneven heads": lambda shape: plan(4, shape=shape),
    "usp": lambda shape: context_plan(4, "usp", shape=shape),
    "tensor and ring": lambda shape: context_plan(2, "ring", 2, shape=shape),
    "tensor and ulysses": lambda shape: context_plan(
        2, "ulysses", 2, shape={**shape, "heads": 12, "kv_heads": None, "head_dim": 4}
    ),
    "recomputed ring": lambda shape: context_plan(
        2, "ring", shape=shape, changes={"strategy.recompute": "full"}
    ),
    "zero bubble": lambda shape: plan(
        1, 2, shape=shape, changes={"strategy.pipeline.schedule": "zb-h1"}
    ),
    "fused kernels": lambda shape: plan(2, shape=shape, changes={"strategy.kernels": "fused"}),
    "math": lambda shape: plan(2, shape=shape, changes={"strategy.attention": "math"}),
    "blockwise ring": lambda shape: context_plan(
        2, "ring", shape=shape, changes={"strategy.attention": "blockwise"}
    ),
}


@pytest.mark.slow
@pytest.mark.drawn(6)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", SHAPES)
def test_a_family_equals_one_device_on_a_mesh(name: str, mesh: str) -> None:
    assert_equal_to_one_device(verify(MESHES[mesh](SHAPES[name]), "fp64"))


def test_windows_off_by_one_on_a_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    tiles, attend = blockwise_attention.visible_tiles, blockwise_attention.attend_tile

    def wider(rule: ScoreRule) -> ScoreRule:
        return replace(rule, window=rule.window and rule.window + 1)

    monkeypatch.setattr(blockwise_ring, "visible_tiles", lambda q, k, w: tiles(q, k, w and w + 1))
    monkeypatch.setattr(
        blockwise_ring,
        "attend_tile",
        lambda kernel, rule, *more: attend(kernel, wider(rule), *more),
    )
    assert failure_of(verify(context_plan(2, "ring", shape=MISTRAL)))["tensor"]


def first_slopes(model: Transformer, mesh: Mesh) -> None:
    """Every rank's attention has the slopes of the first rank's heads."""
    for module in model.modules():
        if isinstance(module, Attend):
            module.rule = module.rule.for_heads(0, 3, 3)


@pytest.mark.parametrize("axis", ["tensor", "ulysses"])
def test_slopes_of_another_ranks_heads(monkeypatch: pytest.MonkeyPatch, axis: str) -> None:
    monkeypatch.setattr(apply_strategy, "apply_head_rules", first_slopes)
    made = plan(2, shape=BLOOM) if axis == "tensor" else context_plan(2, "ulysses", shape=BLOOM)
    assert failure_of(verify(made))["tensor"]


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "flash with a soft-cap": (
        GEMMA,
        {"strategy.attention": "flash"},
        "strategy.attention.*model.window 3 and model.attention_softcap 0.8; legal: auto, "
        "blockwise, math",
    ),
    "blockwise of plain scores": (
        LLAMA,
        {"strategy.attention": "blockwise"},
        "is for a window shorter than the sequence, ALiBi, a soft-cap or documents; legal: auto, "
        "flash, math",
    ),
    "math on a ring": (
        BLOOM,
        {
            "cluster.gpus": 2,
            "strategy.context": {"size": 2, "algorithm": "ring"},
            "strategy.attention": "math",
        },
        "ring attention cannot use.*legal: auto, flash, blockwise",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_kernel_that_cannot_is_refused(name: str) -> None:
    shape, changes, message = REFUSED[name]
    with pytest.raises(PlanError, match=message):
        plan(shape=shape, changes=changes).resolve()


@pytest.mark.parametrize("field", ["model.positions", "model.logit_softcap"])
def test_a_grid_without_them_refuses_them(field: str) -> None:
    grid = {"cluster.gpus": 4, "strategy.tensor": {"size": [2, 2], "algorithm": "2d"}}
    shape = {**GEMMA, "kv_heads": 4, "positions": "alibi"}
    made = plan(shape=shape, changes=grid).resolve()
    found = {problem.field: problem.message for problem in unsupported(made, "run")}
    assert "which this version cannot run beside strategy.tensor.algorithm '2d'" in found[field]


@pytest.mark.slow
def test_windows_and_soft_caps_on_a_grid_equal_one_device() -> None:
    shape = {**GEMMA, "kv_heads": 4, "logit_softcap": None}
    grid = {"cluster.gpus": 4, "strategy.tensor": {"size": [2, 2], "algorithm": "2d"}}
    assert_equal_to_one_device(verify(plan(shape=shape, changes=grid), "fp64"))


@pytest.mark.slow
def test_windows_and_soft_caps_beside_operators_equal_one_device() -> None:
    made = plan(2, shape={**GEMMA, "logit_softcap": None})
    operators = columns_before_rows(made.resolve().shape, 2)
    made = made.replace(**{"strategy.operators": operators})
    assert_equal_to_one_device(verify(made, "fp64"))


def test_a_window_as_long_as_the_sequence_leaves_the_kernel() -> None:
    gpu = {"cluster.gpu": "h100-sxm-80gb", "strategy.precision": "bf16"}
    found = {
        length: plan(
            shape={**MISTRAL, "window": 64}, changes={**gpu, "training.sequence_length": length}
        )
        .resolve()
        .strategy.attention
        for length in (64, 128)
    }
    assert found == {64: "flash", 128: "blockwise"}
