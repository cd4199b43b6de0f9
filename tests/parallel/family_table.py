"""Every family of `plan/catalog/families`, as a small configuration, under every axis.

`python -m tests.parallel.family_table [FAMILY ...]` verifies each cell against one device and
prints a table: the largest relative difference of loss, gradients and weights in fp64, or the field
that refuses the plan. With `--lora` low-rank adapters are trained in place of the weights.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from tests.parallel.operator_strategies import columns_before_rows
from workbench.engine.verify.equivalence import verify
from workbench.errors import PlanError
from workbench.plan.catalog.families.table import FAMILIES
from workbench.plan.catalog.huggingface_config import shape_of
from workbench.plan.model.model_shape import Shape
from workbench.plan.rules.supported import require
from workbench.plan.schema import Plan

LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 258,
    "max_position_embeddings": 64,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {
    **LLAMA,
    **EXPERTS,
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "max_position_embeddings": 640,
    "rope_scaling": {
        "type": "yarn",
        "factor": 10,
        "original_max_position_embeddings": 64,
        "mscale": 1.0,
        "mscale_all_dim": 0.8,
    },
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "mistral": LLAMA | {"sliding_window": 6},
    "qwen2": LLAMA,
    "qwen3": LLAMA | {"head_dim": 16},
    "qwen3_moe": LLAMA | EXPERTS | {"head_dim": 16, "num_experts": 4},
    "phi3": LLAMA | {"sliding_window": 6},
    "gemma2": LLAMA | {"head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 10},
    "gemma3_text": LLAMA
    | {
        "head_dim": 8,
        "sliding_window": 6,
        "query_pre_attn_scalar": 10,
        "sliding_window_pattern": 2,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "olmo2": LLAMA,
    "mixtral": LLAMA | {"num_local_experts": 4},
    "gpt2": {"n_embd": 32, "n_layer": 4, "n_head": 4, "vocab_size": 258, "n_positions": 64},
    "opt": {
        "hidden_size": 32,
        "ffn_dim": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "vocab_size": 258,
        "max_position_embeddings": 64,
    },
    "bloom": {"hidden_size": 32, "n_layer": 4, "n_head": 4, "vocab_size": 258},
    "gpt_neox": LLAMA | {"rotary_pct": 0.5},
    "falcon": LLAMA | {"new_decoder_architecture": True, "num_kv_heads": 2},
    "deepseek_v2": LATENT
    | {"q_lora_rank": None, "topk_method": "group_limited_greedy", "routed_scaling_factor": 1.5},
    "deepseek_v3": LATENT | {"q_lora_rank": 24, "routed_scaling_factor": 2.5},
}
"""model_type -> the keys of a small configuration, with what the family is known for."""


def _on(axis: str, gpus: int = 2, **fields: Any) -> dict[str, Any]:
    """Changes of a plan that give an axis all GPUs."""
    named = {f"strategy.{axis}.{field}": value for field, value in fields.items()}
    return {"cluster.gpus": gpus, f"strategy.{axis}.size": gpus} | named


AXES: dict[str, dict[str, Any]] = {
    "data": {"cluster.gpus": 2},
    "ZeRO-1": {"cluster.gpus": 2, "strategy.data.zero": 1},
    "ZeRO-2": {"cluster.gpus": 2, "strategy.data.zero": 2},
    "ZeRO-3": {"cluster.gpus": 2, "strategy.data.zero": 3},
    "tensor": _on("tensor"),
    "+ sequence": _on("tensor", sequence=True),
    "2-D": {**_on("tensor", 4, algorithm="2d"), "strategy.tensor.size": [2, 2]},
    "pipeline": _on("pipeline"),
    "interleaved": _on("pipeline", schedule="interleaved", chunks=2),
    "zero bubble": _on("pipeline", schedule="zb-h1"),
    "ring": _on("context"),
    "Ulysses": _on("context", algorithm="ulysses"),
    "experts": _on("expert"),
    "recompute": {"strategy.recompute": "full"},
    "operators": {"cluster.gpus": 2, "strategy.tensor.size": 2, "strategy.operators": True},
}
"""Column of the table -> the plan's changes."""
EVERYWHERE = ("data", "ZeRO-1", "ZeRO-2", "ZeRO-3", "tensor", "pipeline")
"""Axes that every family has."""


def shape(family: str) -> Shape:
    """The small shape of a family, read from its configuration."""
    return shape_of({"model_type": family, **CONFIGS[family]}, family)


def plan(family: str, axis: str, lora: bool = False) -> Plan:
    """The plan of a cell. Raises `PlanError` where no such plan is legal."""
    small = shape(family)
    changes = dict(AXES[axis])
    if changes.get("strategy.operators"):
        changes["strategy.operators"] = columns_before_rows(small, 2)
    written = Plan.model_validate(
        {
            "model": small.model_dump(),
            "cluster": {"gpu": "local", "gpus": 1},
            "strategy": {"data": {"bucket_mib": 0.01}},
            "training": {
                "sequence_length": 16,
                "global_batch": 8,
                "micro_batch": 2,
                "steps": 3,
                "optimizer": {"clip": 0.5, "learning_rate": 1e-2},
            },
        }
    )
    return written.replace(**changes, **({"finetune.lora.rank": 3} if lora else {}))


def cell(family: str, axis: str, lora: bool = False) -> str:
    """The largest relative difference, or what refuses the plan."""
    if axis == "experts" and shape(family).moe is None:
        return "dense"
    try:
        made = plan(family, axis, lora)
        require(made.resolve(), "run")
    except PlanError as error:
        return f"refused: {error.problems[0].field}"
    answer = verify(made, "fp64")
    worst = max(answer["max_relative_diff"].values())
    return f"{worst:.0e}" if answer["passed"] else f"FAILS, {answer['worst']['tensor']}"


def table(families: Iterable[str], lora: bool) -> Iterator[str]:
    """The lines of the table, as they are found, and how many of its cells are verified."""
    yield f"| family | {' | '.join(AXES)} |"
    yield f"|---|{'---|' * len(AXES)}"
    verified = refused = 0
    for family in families:
        cells = [cell(family, axis, lora) for axis in AXES]
        refused += sum(it.startswith("refused") for it in cells)
        verified += sum(it[0].isdigit() for it in cells)
        yield f"| {family} | {' | '.join(cells)} |"
    yield ""
    share = verified / max(1, verified + refused)
    yield f"{verified} of {verified + refused} cells verified ({share:.0%}), {refused} refused."


if __name__ == "__main__":
    torch.set_num_threads(1)
    asked = [word for word in sys.argv[1:] if word != "--lora"]
    for line in table(asked or FAMILIES, "--lora" in sys.argv):
        print(line, flush=True)
