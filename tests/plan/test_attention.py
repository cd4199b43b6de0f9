"""Which attention kernel a plan gets, and which it may ask for."""

import re
from typing import Any

import pytest

from workbench.errors import PlanError
from workbench.plan.schema import Plan


def resolved(gpu: str, precision: str, head_dim: int = 16, **more: Any) -> Any:
    model = {"layers": 2, "hidden": 128, "heads": 8, "kv_heads": 2, "ffn": 256, "vocab": 256}
    changes = {"model": model | {"head_dim": head_dim}, "strategy.precision": precision} | more
    return Plan.of("tiny", gpu=gpu, gpus=2, strategy="ddp", set=changes).resolve()


@pytest.mark.parametrize(
    ("gpu", "precision", "head_dim", "kernel"),
    [
        ("h100-sxm-80gb", "bf16", 16, "flash"),
        ("h100-sxm-80gb", "fp16", 12, "flash"),
        ("h100-sxm-80gb", "bf16", 512, "efficient"),
        ("h100-sxm-80gb", "fp32", 12, "efficient"),
        ("h100-sxm-80gb", "tf32", 6, "math"),
        ("t4", "fp16", 16, "efficient"),
        ("v100-sxm2-16gb", "fp16", 12, "math"),
        ("local", "fp32", 6, "flash"),
    ],
)
def test_auto_is_the_best_that_the_gpu_has(
    gpu: str, precision: str, head_dim: int, kernel: str
) -> None:
    assert resolved(gpu, precision, head_dim).strategy.attention == kernel


@pytest.mark.parametrize(
    ("gpu", "precision", "attention", "more", "legal"),
    [
        ("t4", "fp16", "flash", {}, "auto, efficient, math"),
        ("h100-sxm-80gb", "fp32", "flash", {}, "auto, efficient, math"),
        ("local", "fp32", "efficient", {}, "auto, flash, math"),
        ("local", "fp32", "math", {"strategy.context.size": 2}, "auto, flash"),
    ],
)
def test_a_kernel_that_the_gpu_lacks_is_refused_with_those_it_has(
    gpu: str, precision: str, attention: str, more: dict[str, Any], legal: str
) -> None:
    with pytest.raises(PlanError, match=re.escape(f"legal: {legal}")):
        resolved(gpu, precision, **{"strategy.attention": attention}, **more)


def test_ring_attention_says_which_head_sizes_it_takes_on_gpus() -> None:
    with pytest.raises(PlanError, match="head_dim that 8 divides"):
        resolved("h100-sxm-80gb", "bf16", 12, **{"strategy.context.size": 2})


def test_other_stacks_run_their_own_attention_kernels_and_loss() -> None:
    own = {"strategy.stack": "fsdp"}
    usual = resolved("h100-sxm-80gb", "bf16", **own).strategy
    assert (usual.attention, usual.loss) == ("auto", "auto")
    stated = {"strategy.attention": "flash-3", "strategy.kernels": "liger"}
    stated |= {"strategy.loss": "fused_linear"}
    found = resolved("h100-sxm-80gb", "bf16", **own, **stated).strategy
    assert [found.attention, found.kernels, found.loss] == list(stated.values())


@pytest.mark.parametrize(
    ("gpu", "changes", "field", "legal"),
    [
        ("h100-sxm-80gb", {"attention": "flash-3"}, "attention", "auto, flash, efficient, math"),
        ("h100-sxm-80gb", {"stack": "fsdp", "attention": "math"}, "attention", "auto, unfused, "),
        (
            "v100-sxm2-16gb",
            {"stack": "fsdp", "attention": "flash-2"},
            "attention",
            "auto, unfused, efficient",
        ),
        ("h100-sxm-80gb", {"kernels": "liger"}, "kernels", "eager, compiled, fused"),
        ("h100-sxm-80gb", {"loss": "chunked"}, "loss", "auto, whole"),
        ("h100-sxm-80gb", {"loss": "fused_linear"}, "loss", "auto, whole"),
        ("h100-sxm-80gb", {"loss": "whole", "kernels": "fused"}, "loss", "auto, fused_linear"),
        (
            "h100-sxm-80gb",
            {"loss": "fused_linear", "kernels": "fused", "tensor.size": 2},
            "loss",
            "auto, whole",
        ),
    ],
)
def test_what_a_stack_does_not_run_is_refused_by_its_field(
    gpu: str, changes: dict[str, str], field: str, legal: str
) -> None:
    at = {f"strategy.{name}": value for name, value in changes.items()}
    with pytest.raises(PlanError) as refused:
        resolved(gpu, "fp16" if "v100" in gpu else "bf16", **at)
    found = {problem.field: problem.message for problem in refused.value.problems}
    assert f"legal: {legal}" in found[f"strategy.{field}"]
