"""Recipes of a framework profile: which one a plan has, each against the configuration that its
source names.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from workbench.costmodel.frameworks.framework_profile import (
    FrameworkProfile,
    framework_profile,
    plan_profile,
)
from workbench.costmodel.frameworks.profile_recipes import is_called, is_recipe_of
from workbench.costmodel.rates.constants import constants, plan_constants
from workbench.costmodel.rates.fitted_constants import fitted_constants
from workbench.plan.schema import Plan


@pytest.mark.parametrize(
    ("model", "name", "same"),
    [
        ("Qwen3_30B_a3B", "qwen3-30b-a3b", True),
        ("Qwen3_30B_a3B (tokendrop)", "qwen3-30b-a3b", True),
        ("DeepSeekV3 (w/o MTP)", "deepseek-v3", True),
        ("GPT OSS 120B", "gpt-oss-120b", True),
        ("Moonlight-16B-A3B", "moonlight", True),
        ("Qwen3_235B_a22B", "qwen3-30b-a3b", False),
        ("LLAMA3.1_405B", "llama-3-8b", False),
        ("", "moonlight", False),
    ],
)
def test_a_model_is_known_by_its_letters_and_digits(model: str, name: str, same: bool) -> None:
    assert is_called(model, [name]) is same


def test_a_recipe_is_of_all_that_it_does_not_name() -> None:
    of_all: dict[str, list[str]] = {}
    one = {"gpus": ["b200"], "models": ["moonlight"], "precisions": ["bf16"]}
    assert is_recipe_of(of_all, "", "", "")
    assert is_recipe_of(one, "b200", "Moonlight-16B-A3B", "bf16")
    for other in (("b300", "moonlight", "bf16"), ("b200", "", "bf16"), ("b200", "moonlight", "")):
        assert not is_recipe_of(one, *other)


def test_a_profile_without_a_model_has_the_recipes_of_its_gpu_alone() -> None:
    bridge = framework_profile("megatron-bridge")
    assert bridge.kernels.graphs == "attn moe_router moe_preprocess"
    hopper = framework_profile("megatron-bridge", "h100-sxm-80gb")
    assert (hopper.kernels.graphs, hopper.experts.dispatches_from_host) == ("none", True)
    assert framework_profile("megatron-bridge", "b200", "llama-3-8b", "fp8") == bridge


def bridge(release: str, gpu: str, model: str, precision: str) -> tuple[str, bool, bool, bool]:
    """(graphs, dispatch by the host, its overlap, one kernel for all experts) of a release."""
    found = framework_profile(f"megatron-bridge{release}", gpu, model, precision)
    e = found.experts
    return found.kernels.graphs, e.dispatches_from_host, e.overlap_dispatch, e.grouped_gemm


ATTENTION_AND_ROUTER, ROUTER = "attn moe_router moe_preprocess", "moe_router moe_preprocess"


@pytest.mark.parametrize(
    ("release", "gpu", "model", "precision", "expected"),
    [
        # deepseek_workload_base_configs.py, DEEPSEEK_V3_PRETRAIN_CONFIG_GB300_FP8_MX_V2 and
        # B300_V2 of 26.06, GB300_V2 of 26.04, B300_V2 of 26.04.01
        ("", "gb300", "DeepSeekV3", "mxfp8", ("full_iteration", False, True, True)),
        ("", "b300", "DeepSeekV3", "mxfp8", (ATTENTION_AND_ROUTER, False, False, False)),
        ("-26.04", "gb300", "DeepSeekV3", "mxfp8", ("none", True, False, False)),
        ("-26.04", "gb200", "DeepSeekV3", "mxfp8", (ATTENTION_AND_ROUTER, False, False, False)),
        ("-26.04.01", "b300", "DeepSeekV3", "mxfp8", (ATTENTION_AND_ROUTER, False, False, False)),
        ("-25.11", "gb200", "DeepSeekV3 (w/o MTP)", "bf16", (ROUTER, False, False, False)),
        # qwen3_workload_base_configs.py, QWEN3_30B_A3B_PRETRAIN_CONFIG_*_V1
        ("", "b300", "Qwen3_30B_a3B", "mxfp8", ("full_iteration", False, True, True)),
        ("-26.04", "b300", "Qwen3_30B_a3B", "mxfp8", (ROUTER, False, False, False)),
        ("-26.04", "b200", "Qwen3_30B_a3B", "mxfp8", (ATTENTION_AND_ROUTER, False, False, False)),
        ("-25.09", "b200", "Qwen3_30B_a3B", "fp8", ("full_iteration", True, False, False)),
        # qwen3_llm_pretrain.py: the all-to-all dispatcher on B200 and H100
        ("-26.02", "b200", "Qwen3_235B_a22B", "mxfp8", ("none", True, False, False)),
        ("-26.02", "b300", "Qwen3_235B_a22B", "mxfp8", ("none", True, True, False)),
        ("-26.04", "h100-sxm-80gb", "Qwen3_235B_a22B", "fp8", ("none", True, True, False)),
        # gpt_oss_workload_base_configs.py: graphs on GB300 and B300, in bf16 with all-to-all
        ("-26.02", "gb300", "GPT OSS 120B", "bf16", (ATTENTION_AND_ROUTER, True, False, False)),
        ("-26.04", "gb200", "GPT OSS 120B", "bf16", ("none", True, True, False)),
        ("", "b300", "GPT OSS 120B", "mxfp8", (ATTENTION_AND_ROUTER, False, True, True)),
        # kimi_workload_base_configs.py, KIMI_K2_PRETRAIN_CONFIG_GB300
        ("", "gb300", "Kimi_K2", "mxfp8", ("none", True, False, False)),
        # recipes/moonlight/moonlight_16b.py
        ("", "h100-sxm-80gb", "Moonlight-16B-A3B", "bf16", ("none", True, False, False)),
        ("", "b200", "moonlight-16b-a3b", "bf16", ("none", True, False, False)),
    ],
)
def test_megatron_bridges_recipes(
    release: str, gpu: str, model: str, precision: str, expected: tuple[str, bool, bool, bool]
) -> None:
    assert bridge(release, gpu, model, precision) == expected


def test_recipes_say_where_gemms_are_not_split_for_tensor_parallelism() -> None:
    """tp_comm_overlap is off for Moonlight and for Qwen3 235B on H100."""

    def splits(model: str, gpu: str) -> bool:
        return framework_profile("megatron-bridge", gpu, model).model_parallel.overlap_tensor

    assert not splits("moonlight-16b-a3b", "h100-sxm-80gb")
    assert not splits("qwen3-235b-a22b", "h100-sxm-80gb")
    assert splits("qwen3-30b-a3b", "h100-sxm-80gb") and splits("qwen3-235b-a22b", "gb200")


def plan(model: str, **changed: object) -> Plan:
    return Plan.of(model, gpu="h100-sxm-80gb", gpus=8, strategy="zero-1").replace(
        **{"strategy.stack": "megatron-bridge", **changed}
    )


def test_a_plan_has_the_recipe_of_its_model() -> None:
    found: dict[str, FrameworkProfile] = {
        model: plan_profile(plan(model).resolve()) for model in ("moonlight-16b-a3b", "llama-3-8b")
    }
    assert not found["moonlight-16b-a3b"].model_parallel.overlap_tensor
    assert found["llama-3-8b"].model_parallel.overlap_tensor


def test_constants_of_a_plan_are_those_of_its_recipe() -> None:
    own, other = (plan(m).resolve() for m in ("moonlight-16b-a3b", "llama-3-8b"))
    assert own.strategy.kernels == other.strategy.kernels
    usual = constants(other.gpu, other.strategy.kernels, "megatron-bridge")
    assert plan_constants(other) == usual and usual.tensor_overlap > 0
    assert plan_constants(own) == replace(usual, tensor_overlap=0.0)


def test_a_release_that_no_fit_has_seen_has_its_frameworks_multiplier() -> None:
    fitted = fitted_constants({"framework.megatron-bridge": 0.5, "framework.torchtune": -0.25})
    assert fitted.of_framework("megatron-bridge-25.09") == fitted.of_framework("megatron-bridge")
    assert fitted.of_framework("torchtitan") == 1.0
