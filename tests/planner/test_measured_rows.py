"""Measurements read from tables: units, kinds, batches; rows as plans; nothing that people write
makes it fail.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz import examples
from workbench.costmodel.frameworks.framework_profile import framework_table
from workbench.errors import PlanError
from workbench.plan.catalog import catalog
from workbench.plan.model.parameter_count import parameters
from workbench.planner import estimate
from workbench.planner.validation import cell_parsers, predict
from workbench.planner.validation.framework_names import find_framework, framework_defaults
from workbench.planner.validation.gpu_names import find_fabric, find_gpu
from workbench.planner.validation.measured_rows import MeasuredRow, parse_row, read_measured_rows
from workbench.planner.validation.row_shapes import Inexpressible
from workbench.planner.validation.row_to_plan import PlannedRow, is_complete, row_to_plan

LLAMA: dict[Any, Any] = {
    "id": "a-1",
    "source": "here",
    "table": "one, line 7",
    "kind": "measured",
    "framework": "torchtitan",
    "model": "Llama-3-8B",
    "arch": "llama dense GQA",
    "params_b": "8.03",
    "layers": "32",
    "hidden": "4096",
    "ffn": "14336",
    "heads": "32",
    "kv_heads": "8",
    "vocab": "128256",
    "seq": "8192",
    "tied_emb": "no",
    "gated_ffn": "yes",
    "gpu": "H100-SXM-80GB",
    "gpu_mem_gb": "80",
    "n_gpus": "8",
    "tp": "1",
    "pp": "1",
    "dp": "8",
    "mbs": "1",
    "gbs": "8",
    "precision": "bf16",
    "iter_time_s": "1.5",
    "mem_gib": "60",
    "mem_unit": "GiB",
    "mem_kind": "torch max allocated",
    "status": "ok",
}


UNNAMED = {"model": "a decoder", "params_b": ""}
"""Of a row, a name and a size that imply nothing."""


def cells(**changes: Any) -> dict[str | None, object]:
    return {**LLAMA, **changes}


def said(**changes: Any) -> PlannedRow:
    return row_to_plan(parse_row(cells(**changes)))


def reason(**changes: Any) -> str:
    with pytest.raises(Inexpressible) as caught:
        said(**changes)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "unit", "expected"),
    [
        ("80", "GiB", 80.0),
        ("80", "GB as printed (nvidia-smi MiB rounded, probably GiB)", 80.0),
        ("80", "GB as printed; logger divides by 1024^3", 80.0),
        ("80", "GB as printed (max_memory_allocated/1e9)", 80e9 / 2**30),
        ("81920", "MiB", 80.0),
        ("81,920 MiB", "", 80.0),
        ("36.6", "GiB (printed MB = MiB from NVML)", 36.6),
        ("", "GiB", None),
        ("n/a", "GiB", None),
    ],
)
def test_memory_in_gib(text: str, unit: str, expected: float | None) -> None:
    assert cell_parsers.memory_gib(text, unit) == (pytest.approx(expected) if expected else None)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("torch max allocated", "allocated"),
        ("peak allocated", "allocated"),
        ("torch max reserved, max over all GPUs", "reserved"),
        ("torch max allocated or reserved on logging rank (not stated which)", "unknown"),
        ("nvidia-smi snapshot", "nvidia-smi"),
        ("NVML device used (includes context)", "nvidia-smi"),
        ("not stated (likely nvidia-smi)", "unknown"),
        ("torch max_memory_allocated", "allocated"),
        ("torch.cuda.max_memory_reserved()", "reserved"),
        ("max_memory_allocated or memory_reserved", "unknown"),
        ("max_memory_allocated (not_stated)", "unknown"),
        ("nvidia_smi", "nvidia-smi"),
        ("", "unknown"),
    ],
)
def test_kind_of_memory(text: str, expected: str) -> None:
    assert cell_parsers.memory_kind(text) == expected


def test_an_underscore_separates_words() -> None:
    assert cell_parsers.run_status("CUDA_OOM", False) == "out_of_memory"
    assert cell_parsers.run_status("ok_2_steps", False) == "ran"
    assert cell_parsers.is_fused_attention("sdpa_math") is False
    assert cell_parsers.is_fused_attention("attn_implementation=eager_attention") is False
    assert cell_parsers.recompute_kind("no_recompute", 4) == "none"
    assert cell_parsers.recompute_kind("full_layer", 4) == "full"
    assert cell_parsers.kernels("torch_eager") == "eager"
    assert cell_parsers.updates_16bit_weights("pure_bf16")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ok", "ran"),
        ("OOM", "out_of_memory"),
        ("out of memory on rank 0", "out_of_memory"),
        ("failed (OOM or crash; source does not separate them)", "failed"),
        ("timeout", "failed"),
        ("OK (batch fields inconsistent in source)", "ran"),
        ("completed", "ran"),
        ("not stated", "ran"),
        ("", "ran"),
        ("did not run", None),
        ("7", None),
    ],
)
def test_status(text: str, expected: str | None) -> None:
    assert cell_parsers.run_status(text, True) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("fp8 e4m3 matmul, bf16 weights", "fp8"),
        ("bf16 mixed (fp32 master params)", "bf16"),
        ("MXFP8", "mxfp8"),
        ("FP8-MX", "mxfp8"),
        ("FP8-CS", "fp8"),
        ("NVFP4", "nvfp4"),
        ("MXFP4", "fp4"),
        ("fp16 amp", "fp16"),
        ("TF32", "tf32"),
        ("", None),
    ],
)
def test_precision(text: str, expected: str | None) -> None:
    assert cell_parsers.narrowest_precision(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("none (assumed)", "none"),
        ("full (likely)", "full"),
        ("recompute-block", "full"),
        ("selective (per-op SAC)", "selective"),
        ("selective (every 2nd layer)", [0, 2, 4]),
        ("see recipe (not in table)", None),
        ("not in table", None),
        ("", None),
    ],
)
def test_recompute(text: str, expected: Any) -> None:
    assert cell_parsers.recompute_kind(text, 6) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("flash", True),
        ("cudnn flash", True),
        ("sdpa flash", True),
        ("flash (packed samples)", True),
        ("TE fused attention", True),
        ("FA3", True),
        ("flash, fused softmax", True),
        ("no flash", False),
        ("fused softmax, no flash", False),
        ("fused softmax", False),
        ("fused scaled masked softmax", False),
        ("unfused", False),
        ("non-flash", False),
        ("without FlashAttention-2", False),
        ("flash attention: off", False),
        ("flash_attn=False", False),
        ("sdpa (math)", False),
        ("eager", False),
        ("no flash, memory-efficient", True),
        ("not stated", None),
        ("", None),
        ("ring", None),
    ],
)
def test_fused_attention(text: str, expected: bool | None) -> None:
    assert cell_parsers.is_fused_attention(text) is expected


@pytest.mark.parametrize(
    ("stage", "sharding", "expected"),
    [
        ("2", "FSDP", 2),
        ("", "FSDP FULL_SHARD", 3),
        ("", "FSDP SHARD_GRAD_OP", 2),
        ("", "distributed optimizer (default)", 1),
        ("", "DDP", 0),
        ("", "ZeRO-1 within group of 8", 1),
        ("", "", None),
    ],
)
def test_zero(stage: str, sharding: str, expected: int | None) -> None:
    assert cell_parsers.zero_stage(stage, sharding) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ZeRO-2 + optimizer offload to CPU", "optimizer"),
        ("ZeRO-3 Offload (1.5 TB CPU memory)", "parameters"),
        ("flags: --offload-opt-m --offload-master", "optimizer"),
        ("flags: --offload-opt-m; --shard-weights --offload-master", "parameters"),
        ("flags: --offload-quants", "parameters"),
        ("--offload-residual", "none"),
        ("act-cpu-offload=False; FULL_SHARD", "none"),
        ("2T model offload state not stated", "none"),
        ("", "none"),
    ],
)
def test_offload(text: str, expected: str) -> None:
    assert cell_parsers.offload_kind(text) == expected


def test_versions_and_recipes_of_a_framework_are_its_own_profiles() -> None:
    assert cell_parsers.report_year("26.04 NeMo Container / Pre-Training") == 2026.04
    assert cell_parsers.report_year("26.04.01 NeMo Container / Pre-Training") == 2026.0401
    assert cell_parsers.report_year("benchmarks/llama3_h100_202412.md") == 2024.12
    assert cell_parsers.report_year("Table 26.04 of a paper") is None
    assert cell_parsers.report_year("Table 5 of arXiv 2205.05198") == 2022.05
    now, then = (
        find_framework("Megatron-Bridge/mcore", False, True, year) for year in (2026.06, 2026.04)
    )
    assert (now.name, then.name, then.family) == (
        "megatron-bridge",
        "megatron-bridge-26.04",
        "megatron-bridge",
    )
    releases = {
        2025.09: "25.09",
        2025.11: "25.11",
        2026.02: "26.02",
        2026.0201: "26.02.01",
        2026.04: "26.04",
        2026.0401: "26.04.01",
    }
    for year, release in releases.items():
        found = find_framework("Megatron-Bridge/mcore", False, True, year)
        assert (found.name, found.family) == (f"megatron-bridge-{release}", "megatron-bridge")
    assert find_framework("Megatron-Bridge/mcore", False, True, 2026.0601).name == now.name
    assert then.defaults == now.defaults and then.bytes_per_gb == now.bytes_per_gb
    row_by_row = find_framework("torchtitan", False, True, rowwise=True)
    assert (row_by_row.name, row_by_row.family) == ("torchtitan-rowwise", "torchtitan")
    whole = find_framework("torchtune", False, True, whole_loss=True)
    assert (whole.name, whole.family) == ("torchtune-whole-loss", "torchtune")


def test_a_frameworks_recipe_of_one_model_is_a_default_of_that_model_alone() -> None:
    """Megatron-Bridge's Moonlight keeps both moments in bf16, in every version."""
    for year in (2026.06, 2026.04):
        bridge = find_framework("Megatron-Bridge/mcore", False, True, year)
        of_others = bridge.defaults_of("llama-3-8b")
        assert of_others == bridge.defaults and "training.optimizer.moments" not in of_others
        recipe = bridge.defaults_of("Moonlight-16B-A3B")
        assert recipe == {**bridge.defaults, "training.optimizer.moments": "bf16"}


def test_flags_that_add_up_compile_from_the_second_on() -> None:
    """torchtune's README, Optimization flags: baseline, packed, compile, and all that follow."""
    before, after = ("Baseline (unpacked)", "+ Packed"), ("+ Compile", "+ Chunked CE", "LoRA")
    for flags, kernels in ((before, None), (after, "compiled")):
        assert {cell_parsers.kernels(f"cumulative flags: {flag}") for flag in flags} == {kernels}
    assert cell_parsers.kernels("attention eager") == "eager"


@pytest.mark.parametrize(
    ("notes", "whole"),
    [
        ("cumulative flags: Baseline (unpacked, AdamW bf16)", True),
        ("cumulative flags: + Packed", True),
        ("cumulative flags: + Compile", True),
        ("cumulative flags: + Chunked CE", False),
        ("cumulative flags: + Activation checkpointing", False),
        ("LoRA; packed, compile", False),
    ],
)
def test_flags_that_add_up_say_whether_the_loss_is_chunked(notes: str, whole: bool) -> None:
    assert cell_parsers.says_whole_loss(notes) is whole


@pytest.mark.parametrize(
    ("text", "memory", "name", "gib"),
    [
        ("H100-SXM-80GB", 80, "h100-sxm-80gb", 79.3),
        ("NVIDIA A100 80G", None, "a100-sxm-80gb", 79.3),
        ("A100-40GB", 40, "a100-sxm-40gb", 39.6),
        ("A100 (size not read)", None, "a100-sxm-80gb", 79.3),
        ("A100-SXM4-64GB", 64, "a100-sxm-80gb", 0.991 * 64),
        ("V100-SXM3-32GB", 32, "v100-sxm2-32gb", 31.7),
        ("A10G", 24, "a10g", 23.8),
        ("RTX4090", 24, "rtx-4090", 23.8),
        ("H100-SXM 96GB HBM2e 500W", 96, "h100-sxm-96gb", 95.1),
        ("GB200", 192, "gb200", 184.3),
    ],
)
def test_cards_by_words(text: str, memory: float | None, name: str, gib: float) -> None:
    found = find_gpu(text, memory)
    assert found is not None
    assert found.name == name and found.memory_gib == pytest.approx(gib)


@pytest.mark.parametrize("text", ["", "TPU v5p", "a fast one", "80GB SXM"])
def test_unknown_gpus_are_reported(text: str) -> None:
    assert reason(gpu=text) == f"GPU unknown: {text or 'none given'}"


def test_networks_by_words() -> None:
    usual = find_fabric("h100-sxm-80gb", "nothing said")
    assert usual.name == "dgx-h100"
    assert find_fabric("h100-sxm-80gb", "efa (aws p5) inter-node").nic_latency_us == 35.0
    assert find_fabric("a100-sxm-80gb", "4x100gb roce between nodes").nic_gbs == 50.0
    assert find_fabric("v100-sxm2-32gb", "4-gpu v100 nodes (nvlink), omni-path").gpus_per_node == 4


def test_a_rate_alone_says_nothing_of_the_kind_of_network() -> None:
    shares = [
        find_fabric("a100-sxm-80gb", words).nic_share
        for words in ("", "8x200gb infiniband", "4x100gb omni-path", "400 gbps inter-node", "roce")
    ]
    assert shares == [0.96, 0.96, 0.34, None, None]


def test_a_row_becomes_a_plan() -> None:
    found = said()
    plan = found.plan
    assert found.profile == "torchtitan"
    assert (plan.world_size, plan.sizes["data"], plan.training.global_batch) == (8, 8, 8)
    assert plan.strategy.data.zero == 3
    assert plan.strategy.recompute == "selective"
    assert {"strategy.data.zero", "strategy.recompute"} <= set(found.assumed)
    assert found.seconds == 1.5
    assert found.memory_gib == 60.0
    assert parameters(plan.shape).total == pytest.approx(8.03e9, rel=0.01)
    assert found.row.table == "one"


def test_what_the_row_says_goes_before_the_framework() -> None:
    found = said(recompute="full", zero_stage="2", notes="torch.compile; 4-GPU nodes")
    assert (found.plan.strategy.recompute, found.plan.strategy.data.zero) == ("full", 2)
    assert found.plan.strategy.kernels == "compiled"
    assert found.plan.cluster.gpus_per_node == 4
    assert "strategy.recompute" not in found.assumed


def test_words_of_attention_say_nothing_of_the_other_kernels() -> None:
    assert said(framework="Megatron-LM", attn_impl="eager").plan.strategy.kernels == "fused"
    assert said(attn_impl="flex (compiled)").plan.strategy.kernels == "eager"
    assert said(framework="Megatron-LM", notes="eager").plan.strategy.kernels == "eager"


def test_attention_that_is_not_flash_takes_the_profile_whose_scores_are_kept() -> None:
    old = {"framework": "Megatron-LM", "gpu": "A100-80GB", "gpu_mem_gb": "80"}
    for words, profile in (
        ("flash", "megatron"),
        ("no flash", "megatron-2021"),
        ("fused softmax, no flash", "megatron-2021"),
    ):
        assert said(**old, attn_impl=words).profile == profile
    assert said(**{**old, "gpu": LLAMA["gpu"]}, attn_impl="no flash").profile == "megatron-2021"
    for words, attention in (("no flash", "unfused"), ("FA3", "flash-3"), ("flash", "auto")):
        found = said(attn_impl=words)
        assert (found.profile, found.plan.strategy.attention) == ("torchtitan", attention)
    assert said(framework="my own", attn_impl="eager").plan.strategy.attention == "unfused"
    trainer = {"framework": "HF Trainer", "notes": "Liger kernels"}
    stated = said(**trainer, attn_impl="sdpa").plan.strategy
    assert (stated.attention, stated.kernels, stated.loss) == ("flash-2", "liger", "fused_linear")


def test_times_from_rates() -> None:
    assert said(iter_time_s="", samples_per_s="16").seconds == pytest.approx(0.5)
    assert said(iter_time_s="", tokens_per_s="131072").seconds == pytest.approx(0.5)
    assert said(iter_time_s="", tokens_per_s_gpu="16,384").seconds == pytest.approx(0.5)
    assert said(iter_time_s="250 ms").seconds == pytest.approx(0.25)
    assert said(iter_time_s="").seconds is None


def test_batches_follow_from_each_other() -> None:
    assert said(gbs="", grad_accum="4").plan.training.global_batch == 32
    assert said(mbs="", gbs="64", grad_accum="4").plan.training.micro_batch == 2
    assert said(gbs="64", grad_accum="").plan.num_microbatches == 8
    assert reason(gbs="64", grad_accum="2") == "batch fields contradict"
    assert reason(gbs="12") == "batch fields contradict"
    assert reason(dp="3") == "layout contradicts the number of GPUs"
    # An unknown number of accumulated steps leaves the memory good and the time of a step unknown.
    assert said(gbs="").seconds is None


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"layers": "", **UNNAMED}, "missing layers"),
        ({"mbs": "", "gbs": "64"}, "missing mbs"),
        ({"n_gpus": "", "dp": ""}, "missing n_gpus"),
        ({"arch": "bert encoder"}, "not a dense decoder: not a decoder"),
        ({"arch": "llama sliding window"}, "sliding window of unknown size"),
        ({"kind": "paper formula"}, "not a measurement"),
        ({"precision": "NVFP4"}, "precision fp4"),
        ({"precision": "MXFP4", "gpu": "B200"}, "precision fp4"),
        ({"precision": "fp8", "gpu": "A100-80GB"}, "illegal: strategy.precision"),
        ({"tp": "3", "dp": "", "n_gpus": "6", "gbs": "2"}, "illegal: strategy.tensor.sequence"),
        (
            {"arch": "MLA+MoE (moe_ffn 64)", "n_experts": "64", "topk": "2", **UNNAMED},
            "latent attention of unknown widths",
        ),
        ({"notes": "QLoRA"}, "adapters on a quantised model"),
        ({"notes": "LoRA"}, "adapters of unknown rank"),
        ({"notes": "opt-in-bwd"}, "optimizer steps inside backward"),
    ],
)
def test_reasons(changes: dict[str, str], expected: str) -> None:
    assert reason(**changes) == expected


def test_shapes_by_words() -> None:
    gpt = said(
        arch="gpt dense MHA (alibi, embedding LN)",
        gated_ffn="no",
        ffn="",
        tied_emb="",
        params_b="6.9",
        kv_heads="",
    )
    shape = gpt.plan.shape
    assert (shape.mlp, shape.norm, shape.positions, shape.biases) == (
        "gelu",
        "layernorm",
        "alibi",
        "all",
    )
    assert (shape.ffn, shape.embedding_norm, shape.kv_heads) == (16384, True, 32)
    assert shape.tied, "6.9B is nearer to one table of the vocabulary than to two"
    assert said(arch="qwen2 (qkv bias)").plan.shape.biases == "qkv"
    moe = said(
        arch="MoE GQA (moe_ffn 768), 1 shared", n_experts="128", topk="8", params_b=""
    ).plan.shape.moe
    assert moe is not None
    assert (moe.experts, moe.top_k, moe.ffn, moe.shared) == (128, 8, 768, 1)


def test_vocabulary_from_the_stated_parameters() -> None:
    assert said(vocab="").plan.shape.vocab == pytest.approx(128256, rel=0.02)


def test_a_bare_gb_is_what_the_stack_prints() -> None:
    bridge, plain = {"framework": "Megatron-Bridge"}, {"mem_unit": "GB as printed"}
    assert said(**bridge, **plain).memory_gib == pytest.approx(60e9 / 2**30)
    assert said(**plain).memory_gib == 60.0
    assert said(**bridge).memory_gib == 60.0
    assert said(**bridge, **plain, mem_kind="nvidia-smi").memory_gib == 60.0


def test_rows_that_their_table_warns_of() -> None:
    assert parse_row(
        cells(kind="measured (author warns +-40% from network noise)")
    ).flagged_by_source
    assert parse_row(cells(notes="duplicate config in source with another value")).flagged_by_source
    assert not parse_row(cells()).flagged_by_source


def test_defaults_of_several_devices() -> None:
    one = said(framework="litgpt", n_gpus="1", dp="1", gbs="1").plan.strategy
    assert (one.data.zero, one.recompute) == (0, "none")
    many = said(framework="litgpt").plan.strategy
    assert (many.data.zero, many.recompute) == (3, "full")


def test_adapters_take_the_stack_default() -> None:
    lora = said(framework="NeMo 24.07", table="Finetuning LoRA").plan.lora
    assert lora is not None
    assert lora.rank == framework_defaults()["nemo"].defaults["finetune.lora.rank"]
    stated = said(framework="NeMo 24.07", notes="LoRA rank=16").plan.lora
    assert stated is not None
    assert stated.rank == 16


def test_a_row_is_of_megatron_lm_2022_by_what_it_uses() -> None:
    """2205.05198: sequence parallelism and selective recomputation, or a report of that time."""
    old = {"framework": "Megatron-LM", "gpu": "A100-80GB", "gpu_mem_gb": "80"}
    assert said(**old, recompute="full").profile == "megatron-2021"
    for changed in (
        {"recompute": "selective"},
        {"tp": "8", "seq_parallel": "yes", "dp": ""},
        {"source": "Table 5 of arXiv 2205.05198"},
    ):
        assert said(**(old | {"recompute": "full"} | changed)).profile == "megatron-2022"
    assert said(**old, source="arXiv 2104.04473").profile == "megatron-2021"


@pytest.mark.parametrize(
    ("framework", "sharded", "flash", "expected"),
    [
        ("nanotron", False, True, "nanotron"),
        ("NeMo 24.07 / mcore", False, True, "nemo"),
        ("NeMo AutoModel (PyTorch FSDP2)", True, True, "fsdp"),
        ("Megatron-Bridge/mcore", False, True, "megatron-bridge"),
        ("Megatron-DeepSpeed", False, False, "deepspeed-3d"),
        ("Megatron-DeepSpeed, ZeRO-3 data parallel only", True, False, "deepspeed-zero"),
        ("Megatron-LM", False, False, "megatron-2021"),
        ("Megatron-LM", False, True, "megatron"),
        ("llm-foundry (Composer+PyTorch FSDP)", True, True, "llm-foundry"),
        ("something new", True, True, "textbook"),
        ("", False, False, "textbook"),
    ],
)
def test_stacks_by_words(framework: str, sharded: bool, flash: bool, expected: str) -> None:
    assert find_framework(framework, sharded, flash).name == expected


def figures(entry: Any) -> list[dict[str, Any]]:
    """Every mapping with a `value` below `entry`."""
    if not isinstance(entry, dict):
        return []
    return (
        [entry]
        if "value" in entry
        else [found for inner in entry.values() for found in figures(inner)]
    )


def test_stacks_say_only_what_is_sourced() -> None:
    """Every figure has its source; no profile is keyed by a model of the catalog or by where
    measurements come from.
    """
    table = framework_table()
    models = {name.lower() for name in catalog.models()}
    for name, entry in table.items():
        assert not {name, *entry["matches"]} & models
        assert not any(
            word in match for match in entry["matches"] for word in (".csv", "github", "/", "table")
        )
        assert all(
            path.split(".")[0] in ("strategy", "training", "finetune")
            for path in entry.get("defaults", {})
        )
        assert all(figure.get("source") for figure in figures(entry)), name
        assert set(entry.get("becomes", {}).values()) | {entry.get("like", name)} <= set(table)


def test_complete_rows_are_those_with_what_decides_the_cost() -> None:
    assert is_complete(parse_row(cells(recompute="", zero_stage="", seq_parallel="")))
    for field in ("layers", "hidden", "heads", "ffn", "seq", "gpu", "mbs"):
        assert not is_complete(parse_row(cells(**{**UNNAMED, "gbs": "16", field: ""}))), field
    assert not is_complete(parse_row(cells(gbs="", grad_accum="")))
    assert not is_complete(parse_row(cells(n_experts="8")))


def test_predict_is_estimate() -> None:
    for changes in (
        {},
        {"tp": "2", "dp": "4", "pp": "1", "gbs": "8", "seq_parallel": "yes"},
        {"recompute": "full"},
    ):
        plan = said(**changes).plan
        short, whole = predict(plan), estimate(plan)
        assert short.seconds == pytest.approx(whole.step_seconds)
        assert short.peak_gib == pytest.approx(
            max(whole.peak_bytes_by_rank.values()) / 2**30, rel=1e-6
        )


WORDS = st.text(max_size=30) | st.sampled_from(
    [
        "",
        "0",
        "-1",
        "1",
        "2",
        "8",
        "4-8",
        "1e400",
        "nan",
        "4,096",
        "8k",
        "80 GB",
        "yes",
        "no",
        "none",
        "full",
        "LoRA",
        "FSDP 64",
        "every 0 layers",
        "HSDP",
        "ZeRO-3",
        "1e9",
        "offload",
        "4x0Gb",
        "0-GPU nodes",
        "moe",
        "99999999999999",
    ]
)


@settings(max_examples=examples(300), deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(sorted(LLAMA))
        | st.sampled_from(
            [
                "notes",
                "sharding",
                "vpp",
                "schedule",
                "cp",
                "zero_stage",
                "recompute",
                "n_experts",
                "topk",
                "seq_parallel",
                "grad_accum",
                "unheard_of",
                "attn_impl",
            ]
        ),
        WORDS,
        max_size=6,
    )
)
def test_no_row_fails(changes: dict[str, str]) -> None:
    found = parse_row(cells(**changes))
    assert isinstance(found, MeasuredRow)
    is_complete(found)
    try:
        plan = row_to_plan(found).plan
    except Inexpressible as why:
        assert str(why)
    else:
        assert plan.world_size >= 1


def write(path: Path, rows: list[dict[str | None, object]]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [str(name) for name in rows[0]])
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_files_with_oddities(tmp_path: Path) -> None:
    odd = tmp_path / "odd.csv"
    odd.write_bytes(b"\xef\xbb\xbfID, Layers ,n_gpus\n1,2,\x00\n\xff,,,,,\n\n")
    assert [found.layers for found in read_measured_rows(odd)] == [2, None]
    (tmp_path / "empty.csv").write_text("")
    for name in ("empty.csv", "missing.csv", "."):
        with pytest.raises(PlanError):
            read_measured_rows(tmp_path / name)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_utf16_is_refused_not_read_as_no_rows(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes("model,layers\nllama,32\n".encode(encoding))
    with pytest.raises(PlanError, match=r"rows\.csv: begins like UTF-16.*save it as UTF-8"):
        read_measured_rows(path)


@pytest.mark.parametrize(
    ("header", "said"),
    [
        ("model,layers,layers", "columns 2 'layers' and 3 'layers' both mean layers"),
        ("gpus,model,n_gpus", "columns 1 'gpus' and 3 'n_gpus' both mean n_gpus"),
    ],
)
def test_two_columns_of_one_meaning_are_refused(tmp_path: Path, header: str, said: str) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(f"{header}\n1,2,3\n")
    with pytest.raises(PlanError, match=rf"rows\.csv, line 1: {said}; legal: one column"):
        read_measured_rows(path)


def test_an_unknown_status_is_kept_and_counts_as_a_run(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("model,Status,iter_time_s\nllama,ok,1\n\nllama,quickly,1\nllama,quickly,\n")
    rows = read_measured_rows(path)
    assert [row.status for row in rows] == ["ran", "ran", "failed"]
    assert [row.unknown_status for row in rows] == ["", "quickly", "quickly"]
    path.write_text("model,status,,\nllama,ok,,\nllama,,,\n")
    assert [row.status for row in read_measured_rows(path)] == ["ran", "failed"]
