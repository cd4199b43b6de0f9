"""Documents packed into one sequence train as if each were run alone, under every axis."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.parallel.small import GPT, LLAMA, plan
from tests.parallel.test_attention_rules import BLOOM, GEMMA, MISTRAL
from tests.parallel.test_context import context_plan
from tests.parallel.test_equality import assert_equal_to_one_device
from tests.parallel.test_mutations import failure_of
from workbench.engine.verify.drawn_batches import random_batches
from workbench.engine.verify.equivalence import verify
from workbench.engine.verify.single_device import verification_weight
from workbench.errors import PlanError
from workbench.models import Transformer
from workbench.models.attention import blockwise_attention
from workbench.models.attention.packed_documents import document_starts
from workbench.models.attention.score_rule import ScoreRule
from workbench.models.seams import IGNORE_INDEX, Attend
from workbench.parallel.context import ring_attention
from workbench.plan.resolved_plan import ResolvedPlan

SHAPES: dict[str, dict[str, Any]] = {
    "rope": LLAMA,
    "learned": GPT,
    "alibi": BLOOM,
    "window": MISTRAL,
    "soft-cap": GEMMA,
}
MASK = ScoreRule.mask
CHUNKED = {"strategy.pipeline.chunks": 2}
PACKED = {"corpus.separate_documents": True}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blockwise_attention, "TILE_QUERIES", 5)


def packed(shape: dict[str, Any], **changes: Any) -> ResolvedPlan:
    return plan(shape=shape, changes={**PACKED, **changes}).resolve()


def model_of(made: ResolvedPlan, kernel: str) -> Transformer:
    model = Transformer(made.shape).double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            shape = tuple(parameter.shape)
            parameter.copy_(verification_weight(name, shape, 0, torch.float64))
    for seam in (each for each in model.modules() if isinstance(each, Attend)):
        seam.kernel = kernel
    return model


def gradients(model: Transformer) -> dict[str, Tensor]:
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def run_alone(model: Transformer, tokens_BT: Tensor, targets_BT: Tensor) -> float:
    """The summed loss of every document as a sequence of its own; adds up gradients."""
    total = 0.0
    for tokens, targets in zip(tokens_BT, targets_BT, strict=True):
        ends = [int(i) + 1 for i in (targets == IGNORE_INDEX).nonzero()]
        bounds = [0, *ends, *([len(targets)] if ends[-1:] != [len(targets)] else [])]
        for start, stop in pairwise(bounds):
            loss = model(tokens[None, start:stop], targets[None, start:stop])
            loss.backward()
            total += loss.item()
    return total


@pytest.mark.parametrize("kernel", ["flash", "blockwise", "math"])
@pytest.mark.parametrize("name", SHAPES)
def test_packed_documents_equal_each_run_alone(name: str, kernel: str) -> None:
    if (name, kernel) == ("soft-cap", "flash"):
        kernel = "blockwise"  # torch's kernel knows no soft-cap
    made = packed(SHAPES[name])
    model = model_of(made, kernel)
    tokens, targets, _ = next(random_batches(made))
    alone = run_alone(model, tokens, targets)
    expected = gradients(model)
    model.samples.starts_of_step = document_starts(targets)[None]
    loss = model(tokens, targets)
    loss.backward()
    assert loss.item() == pytest.approx(alone, rel=1e-12)
    least = 1e-6 * max(float(each.abs().max()) for each in expected.values())
    for tensor, gradient in gradients(model).items():
        scale = max(float(expected[tensor].abs().max()), least)
        assert (gradient - expected[tensor]).abs().max() / scale <= 1e-10, tensor


def test_document_starts_follow_the_ignored_targets() -> None:
    ignored = IGNORE_INDEX
    targets = torch.tensor([[ignored, 5, ignored, 7, 8], [1, 2, 3, 4, ignored]])
    assert document_starts(targets).tolist() == [[0, 1, 1, 3, 3], [0, 0, 0, 0, 0]]


AXES: dict[str, Any] = {
    "data and zero": lambda shape: plan(
        data=2, shape=shape, changes={"strategy.data.zero": 2, **PACKED}
    ),
    "tensor and sequence": lambda shape: plan(
        2, shape=shape, changes={"strategy.tensor.sequence": True, **PACKED}
    ),
    "pipeline": lambda shape: plan(1, 2, shape=shape, changes=PACKED),
    "ring": lambda shape: context_plan(2, "ring", shape=shape, changes=PACKED),
    "ulysses": lambda shape: context_plan(2, "ulysses", shape=shape, changes=PACKED),
}


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("name", ["rope", "learned"])
def test_packed_documents_equal_one_device(name: str, axis: str) -> None:
    assert_equal_to_one_device(verify(AXES[axis](SHAPES[name]), "fp64"))


MOE = {**LLAMA, "moe": {"experts": 4, "top_k": 2, "ffn": 16}}
MESHES: dict[str, Any] = {
    "usp": lambda: context_plan(4, "usp", shape=GPT, changes=PACKED),
    "ring of soft-caps": lambda: context_plan(2, "ring", shape=GEMMA, changes=PACKED),
    "ring of biases": lambda: context_plan(4, "ring", shape=BLOOM, changes=PACKED),
    "tensor and ring": lambda: context_plan(2, "ring", 2, shape=GPT, changes=PACKED),
    "zero bubble": lambda: plan(
        1, 2, changes={**PACKED, "strategy.pipeline.schedule": "dualpipe-v"} | CHUNKED
    ),
    "zero-3": lambda: plan(
        data=2, shape=GPT, changes={**PACKED, "strategy.data.zero": 3, "strategy.recompute": "full"}
    ),
    "experts": lambda: plan(data=2, shape=MOE, changes={**PACKED, "strategy.expert.size": 2}),
    "dropout": lambda: plan(2, shape=GPT, changes={**PACKED, "training.dropout": 0.2}),
    "uneven heads": lambda: plan(3, shape=GPT, changes=PACKED),
}


@pytest.mark.slow
@pytest.mark.drawn(4)
@pytest.mark.parametrize("mesh", MESHES)
def test_packed_documents_equal_one_device_on_a_mesh(mesh: str) -> None:
    assert_equal_to_one_device(verify(MESHES[mesh](), "fp64"))


DYNAMIC = {"type": "dynamic", "factor": 2.0, "original_positions": 8}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "operators": (
        {"strategy.operators": {"blocks.*.mlp.*": "replicate"}},
        "strategy.operators may split sequences",
    ),
    "grid": (
        {"strategy.tensor": {"algorithm": "2d", "size": 4}, "cluster.gpus": 4},
        "tensor.algorithm '2d' may split sequences",
    ),
    "dynamic": (
        {"model.rope_scaling": DYNAMIC},
        "of type 'dynamic' follows the length of one document; legal: another type, or false",
    ),
    "framework": ({"strategy.stack": "megatron-lm"}, "strategy.stack is megatron-lm"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_sees_no_documents_is_refused(name: str) -> None:
    changes, message = REFUSED[name]
    with pytest.raises(PlanError, match="corpus.separate_documents: is true, and .*" + message):
        plan(changes={**PACKED, **changes}).resolve()


def test_a_plan_without_is_written_without() -> None:
    assert "separate_documents" not in plan().resolve().model_dump()["corpus"]
    assert packed(LLAMA).model_dump()["corpus"]["separate_documents"] is True


def test_a_rank_that_attends_across_documents_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    # The one device's kernel is math, which makes no mask of its own.
    monkeypatch.setattr(ScoreRule, "mask", lambda rule, q, k, t, d, _=None: MASK(rule, q, k, t, d))
    assert "attention" in failure_of(verify(plan(data=2, changes=PACKED)))["tensor"]


def test_documents_of_other_tokens_in_a_ring_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        ring_attention, "zigzag_indices", lambda length, axis, _: torch.arange(length // axis.size)
    )
    failure_of(verify(context_plan(2, "ring", changes=PACKED)))
