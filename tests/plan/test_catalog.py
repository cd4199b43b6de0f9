"""The catalog: published counts, GPUs with their fabrics, presets that work with a bare number of
GPUs.
"""

import json
import random
import re
from collections.abc import Iterator
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from workbench.errors import PlanError
from workbench.machine import gpu_catalog
from workbench.plan.catalog import catalog, huggingface_config
from workbench.plan.model.parameter_count import parameters
from workbench.plan.rules import legal_sizes
from workbench.plan.rules.supported import runnable
from workbench.plan.schema import Plan

RELIED_ON = {
    "models": ["tiny", "gpt-7.5b", "gpt3-175b", "llama-3-8b", "pangu-200b"],
    "gpus": ["v100-sxm2-32gb", "a100-sxm-80gb", "h100-sxm-80gb", "ascend-910"],
    "strategies": [
        "single",
        "ddp",
        "zero-0",
        "zero-1",
        "zero-2",
        "zero-3",
        "zero-offload",
        "gpipe",
        "dapple",
        "megatron-tp",
        "megatron-3d",
        "pangu-5d",
    ],
}


@pytest.mark.parametrize("kind", RELIED_ON)
def test_names_that_scripts_rely_on(kind: str) -> None:
    assert set(RELIED_ON[kind]) <= set(
        (gpu_catalog if kind == "gpus" else catalog).__dict__[kind]()
    )


@pytest.mark.parametrize("name", catalog.models())
def test_closed_form_count_is_the_published_one(name: str) -> None:
    entry = catalog.models()[name]
    assert entry.source
    found = parameters(entry.shape)
    assert found.total == pytest.approx(entry.parameters, rel=0.01)
    if entry.active_parameters:  # published to two digits, and by some without the embedding lookup
        counts = (found.active, found.active - found.embedding)
        assert min(abs(count / entry.active_parameters - 1) for count in counts) < 0.03


def test_dense_models_are_all_active() -> None:
    found = parameters(catalog.models()["llama-3-8b"].shape)
    assert found.active == found.total == 8030261248


@pytest.mark.parametrize("name", gpu_catalog.gpus())
def test_gpus_have_a_source_and_a_known_fabric(name: str) -> None:
    entry = gpu_catalog.gpus()[name]
    assert entry.gpu.source and entry.fabric in gpu_catalog.clusters()
    assert all(entry.gpu.tflops.values()) and entry.gpu.bandwidth_gbs > entry.gpu.pcie_gbs


def test_an_80_gb_gpu_has_79_3_gib() -> None:
    assert gpu_catalog.gpus()["h100-sxm-80gb"].gpu.memory_gib == 79.3


SPLIT_NOTHING = {
    ("tiny-moe", "colossal-3d"),
    ("llama-3-8b", "expert-parallel"),
    ("gpt3-175b", "expert-parallel"),
}
"""Four ranks are no cube, and a dense model has no experts: another strategy than the one named is
none.
"""


@pytest.mark.parametrize("preset", catalog.strategies())
@pytest.mark.parametrize(
    "model, gpu, gpus",
    [
        ("tiny", "h100-sxm-80gb", 1),
        ("tiny-moe", "a100-sxm-80gb", 4),
        ("llama-3-8b", "h100-sxm-80gb", 24),
        ("gpt3-175b", "v100-sxm2-32gb", 1024),
        ("mixtral-8x7b", "gb200", 128),
    ],
)
def test_presets_need_only_a_number_of_gpus(preset: str, model: str, gpu: str, gpus: int) -> None:
    if preset == "single" and gpus > 1:
        return
    if (model, preset) in SPLIT_NOTHING:
        with pytest.raises(PlanError, match=rf"strategy\.preset: {preset} finds no .* legal: "):
            Plan.of(model, gpu=gpu, gpus=gpus, strategy=preset).resolve()
        return
    full = Plan.of(model, gpu=gpu, gpus=gpus, strategy=preset).resolve()
    product = 1
    for size in full.sizes.values():
        product *= size
    assert product == gpus
    assert full.resolve() == full
    assert isinstance(full.strategy.pipeline.partition, list)
    assert "auto" not in (full.strategy.precision, full.strategy.gradient_dtype)


RULED = {
    name: [
        axis
        for axis in ("tensor", "context", "pipeline", "expert")
        if entry.strategy.get(axis, {}).get("size") in ("node", "rest", "half", "third")
    ]
    for name, entry in catalog.strategies().items()
}
"""Preset -> the axes whose number it leaves to a rule."""


def _odd_plan(draw: random.Random, preset: str) -> Plan:
    """A model, a number of GPUs and a length that few sizes divide."""
    heads = draw.choice([3, 4, 5, 6, 7])
    model: dict[str, Any] = {"hidden": 16 * heads, "heads": heads, "vocab": 509}
    model |= {"layers": draw.choice([2, 3, 4, 7]), "ffn": draw.choice([64, 96, 185])}
    model["kv_heads"] = draw.choice(legal_sizes.divisors(heads))
    if draw.random() < 0.5 or "expert" in RULED[preset]:
        model["moe"] = {"experts": draw.choice([3, 4, 6]), "top_k": 2, "ffn": 48}
    return Plan.model_validate(
        {
            "model": model,
            "cluster": {"gpu": "h100-sxm-80gb", "gpus": draw.choice([2, 3, 4, 5, 6, 9, 12])},
            "strategy": {"preset": preset},
            "training": {"sequence_length": draw.choice([30, 50, 60, 64])},
        }
    )


def _legal_by_hand(plan: Plan, axes: list[str]) -> Iterator[tuple[int, ...]]:
    for sizes in product(legal_sizes.divisors(plan.cluster.gpus), repeat=len(axes)):
        if max(sizes) > 1:
            written = {f"strategy.{axis}.size": size for axis, size in zip(axes, sizes)}
            with suppress(PlanError):
                plan.replace(**written).resolve()
                yield sizes


@pytest.mark.parametrize("preset", [name for name, axes in RULED.items() if axes])
def test_a_preset_finds_a_size_wherever_one_is_legal(preset: str) -> None:
    draw = random.Random(preset)
    for _ in range(12):
        plan = _odd_plan(draw, preset)
        try:
            plan.resolve()
        except PlanError as error:
            assert re.search(r"finds no .* GPUs: .*\d.*; legal: ", str(error)), error
            assert not [*_legal_by_hand(plan, RULED[preset])], (plan, error)


@pytest.mark.parametrize("preset", ["megatron-tp", "megatron-sp"])
def test_a_preset_pads_where_no_size_divides(preset: str) -> None:
    odd = {"hidden": 70, "layers": 7, "heads": 7, "ffn": 185, "vocab": 509}
    plan = Plan.model_validate(
        {
            "model": odd,
            "cluster": {"gpu": "h100-sxm-80gb", "gpus": 3},
            "strategy": {"preset": preset},
            "training": {"sequence_length": 60},
        }
    )
    assert plan.resolve().sizes["tensor"] == 3
    with pytest.raises(PlanError, match="3 tensor ranks are more than heads = 2; legal"):
        plan.replace(**{"model.heads": 2}).resolve()
    longer = plan.replace(**{"training.sequence_length": 64})
    if preset == "megatron-tp":
        assert longer.resolve().sizes["tensor"] == 3
        return
    with pytest.raises(PlanError, match="3 tensor ranks do not divide the 64 tokens that"):
        longer.resolve()


@pytest.mark.parametrize(
    "preset, sizes",
    [
        ("ddp", (1, 4, 1)),
        ("megatron-tp", (4, 1, 1)),
        ("dapple", (1, 1, 4)),
        ("gpipe", (1, 1, 4)),
        ("tensor-pipeline", (2, 1, 2)),
        ("megatron-3d", (2, 1, 2)),
    ],
)
def test_sizes_on_four_ranks(preset: str, sizes: tuple[int, int, int]) -> None:
    found = Plan.of("tiny", gpu="h100-sxm-80gb", gpus=4, strategy=preset).resolve().sizes
    assert (found["tensor"], found["data"], found["pipeline"]) == sizes
    assert runnable(preset)


def test_pangu_on_its_own_cluster() -> None:
    full = Plan.of("pangu-200b", gpu="ascend-910", gpus=2048, strategy="pangu-5d").resolve()
    assert full.sizes == {"tensor": 8, "context": 1, "data": 16, "pipeline": 16}
    assert full.strategy.precision == "fp16" and full.strategy.placement[:2] == [
        "tensor",
        "pipeline",
    ]


def test_a_written_size_wins_over_a_rule_and_the_rest_follows() -> None:
    plan = Plan.of(
        "llama-3-8b",
        gpu="h100-sxm-80gb",
        gpus=64,
        strategy="tensor-pipeline",
        set={"strategy.tensor.size": 2},
    )
    assert plan.resolve().sizes["pipeline"] == 32


@pytest.mark.parametrize("gpus, nodes, each", [(64, 8, 8), (12, 2, 6), (4, 1, 4)])
def test_nodes_hold_the_same_number_of_gpus(gpus: int, nodes: int, each: int) -> None:
    cluster = Plan.of("tiny", gpu="h100-sxm-80gb", gpus=gpus, strategy="ddp").resolve().cluster
    assert (cluster.nodes, cluster.gpus_per_node) == (nodes, each)


LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000,
    "hidden_act": "silu",
}
GPT2 = {
    "model_type": "gpt2",
    "n_layer": 12,
    "n_embd": 768,
    "n_head": 12,
    "vocab_size": 50257,
    "n_positions": 1024,
}
DEEPSEEK = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "vocab_size": 129280,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 163840,
    "n_group": 8,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "routed_scaling_factor": 2.5,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}


@pytest.mark.parametrize(
    "config, name", [(LLAMA, "llama-3-8b"), (GPT2, "gpt2"), (DEEPSEEK, "deepseek-v3")]
)
def test_hugging_face_configurations(tmp_path: Path, config: dict[str, Any], name: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    full = Plan.of(str(tmp_path), gpu="h100-sxm-80gb", gpus=1).resolve()
    known = catalog.models()[name].shape
    assert full.shape.model_copy(update={"name": name}) == known


def test_unknown_family_is_refused_by_name() -> None:
    with pytest.raises(PlanError, match="model_type 'mamba'; legal: bloom, deepseek_v2"):
        huggingface_config.shape_of({"model_type": "mamba"})


def test_missing_key_of_a_configuration_is_named() -> None:
    with pytest.raises(PlanError, match="has no hidden_size"):
        huggingface_config.shape_of({"model_type": "llama", "num_hidden_layers": 2})


@pytest.mark.parametrize("text", ["[1]", "{", "[" * 100_000, "\x00"])
def test_a_file_that_is_no_configuration_is_told_of(tmp_path: Path, text: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises(PlanError, match=r"is not JSON|is no model configuration") as caught:
        huggingface_config.read_huggingface_config(str(file))
    assert caught.value.problems[0].field == "model"
