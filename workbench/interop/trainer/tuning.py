"""Adapters, a 4-bit base and preference of a trainer's arguments."""

from __future__ import annotations

import re
from types import NoneType
from typing import Any

from workbench.errors import refuse
from workbench.interop.trainer.arguments import LARGEST, Arguments
from workbench.interop.translation import ImportOptions, lacks
from workbench.untrusted_text import shown

TARGETS: dict[str, tuple[str, ...]] = {
    **{f"{name}_proj": (f"attention.{name}",) for name in "qkvo"},
    "out_proj": ("attention.o",),
    "c_attn": ("attention.[qkv]",),
    "query_key_value": ("attention.[qkv]",),
    "qkv_proj": ("attention.[qkv]",),
    "q_a_proj": ("attention.q_down",),
    "q_b_proj": ("attention.q",),
    "kv_a_proj_with_mqa": ("attention.kv_down",),
    "kv_b_proj": ("attention.kv_up",),
    **{f"{name}_proj": (name,) for name in ("gate", "up", "down")},
    "gate_up_proj": ("gate", "up"),
    "w1": ("gate",),
    "w2": ("down",),
    "w3": ("up",),
    "c_fc": ("up",),
    "fc1": ("up",),
    "dense_h_to_4h": ("up",),
    "c_proj": ("attention.o", "down"),
    "fc2": ("down",),
    "dense_4h_to_h": ("down",),
    "dense": ("attention.o",),
}
"""Name of a linear layer in transformers -> patterns of a plan's."""
ALL = ("all-linear", "all")
LOSSES = (
    "sigmoid",
    "hinge",
    "ipo",
    "robust",
    "exo_pair",
    "nca_pair",
    "bco_pair",
    "sppo_hard",
    "aot",
    "aot_pair",
    "aot_unpaired",
    "apo_zero",
    "apo_down",
    "discopop",
    "kto_pair",
)
"""Losses of pairs and their reference: they compute as much as a plan's, which is sigmoid."""
NAMES = re.compile(r"(?<![a-z])(dpo|orpo|kto|cpo|simpo|grpo|rloo|ppo)(?![a-z])")
"""A method in the name of a run."""
DROPPED = "TRL turns every dropout off in DPO (disable_dropout), as in a plan's pairs; the same run"
_NAMED = ("output_dir", "hub_model_id", "run_name")
_ONLY_DPO = ("precompute_ref_log_probs", "sync_ref_model", "reference_free", "loss", "rpo_alpha")


def preference(a: Arguments, given: ImportOptions, named: bool) -> dict[str, Any] | None:
    """The plan's `preference` section; None where answers are trained on by their tokens. `named`:
    the command says the trainer.

    Raises `PlanError` for other methods than SFT, continued pre-training and DPO.
    """
    if not _is_dpo(a, given, named):
        return None
    beta = a.number("beta", "finetune.preference.beta")
    loss = a.keys.take(a.key("loss"))
    words = loss if isinstance(loss, list) else [loss or "sigmoid"]
    if len(words) != 1 or words[0] not in LOSSES:
        raise refuse(
            a.key("loss"),
            f"is {shown(loss)}, which has no reference, or more than pairs; a plan trains pairs by "
            f"DPO; legal: {', '.join(LOSSES)}",
        )
    if words[0] != "sigmoid":
        a.keys.mark_untranslated(
            a.key("loss"), "a plan's pairs have DPO's sigmoid; the same memory and time"
        )
    return {"beta": beta}


def _is_dpo(a: Arguments, given: ImportOptions, named: bool) -> bool:
    if a.dialect.format == "llama-factory":
        return _one_of(a, "stage", ("sft", "pt", "dpo")) == "dpo"
    if a.dialect.format == "axolotl":
        return _one_of(a, "rl", ("dpo",)) == "dpo"
    if (
        named
        or a.dialect.trainer != "DPO"
        or any(f.startswith("finetune.pref") for f in given.sets)
    ):
        return a.dialect.trainer == "DPO"
    called = {match[1] for name in _NAMED for match in NAMES.finditer(_said(a, name))}
    if called and called != {"dpo"}:
        raise refuse(
            "beta",
            f"is of {', '.join(sorted(called))}, as the run is called; a plan trains "
            "on tokens, or on pairs by DPO",
        )
    if called:
        a.keys.assume(
            "finetune.preference",
            "DPO",
            "the run is called so; the file has beta, which other methods have too",
        )
    elif not any(a.has(name) for name in _ONLY_DPO):
        raise lacks(
            "finetune.preference.beta",
            "the file has beta, which DPO, ORPO, CPO, KTO and GRPO have, and does not say which; "
            "a plan trains by DPO: if it is that, give --set finetune.preference.beta=0.1",
            {"finetune.preference.beta": 0.1},
        )
    return True


def _said(a: Arguments, name: str) -> str:
    return str(a.keys.value(name) or "").lower()


def _one_of(a: Arguments, meaning: str, legal: tuple[str, ...]) -> str | None:
    """The method that the file names. Raises `PlanError` for one that is none of `legal`."""
    word = a.word(meaning)
    if word is not None and word not in legal:
        raise refuse(
            a.key(meaning),
            f"is {shown(word)}; a plan trains on tokens, or on pairs by DPO: other methods have "
            f"other models in memory and other steps; legal: {', '.join(legal)}",
        )
    return word


def method(a: Arguments) -> str:
    """full or lora."""
    if a.dialect.format == "llama-factory":
        word = _one_of(a, "finetuning_type", ("full", "lora"))
    elif a.dialect.format == "axolotl":
        word = {None: "full", "lora": "lora", "qlora": "lora"}.get(_named_adapter(a), "full")
    else:
        word = "lora" if a.keys.flag("use_peft") else "full"
    if not a.has({"llama-factory": "finetuning_type"}.get(a.dialect.format, "rank")) and (
        a.dialect.format == "llama-factory"
    ):
        a.assume("finetune.method", word, "finetuning_type")
    return str(word)


def _named_adapter(a: Arguments) -> str | None:
    found = a.keys.choice("adapter", {"lora": "lora", "qlora": "qlora"})
    return None if found is None else str(found)


def lora(a: Arguments, paired: bool) -> dict[str, Any]:
    """The plan's `lora` section."""
    rank = a.keys.integer(a.key("rank"))
    if rank is None:
        usual = a.default("rank")
        if usual is None:
            raise refuse(a.key("rank"), "is missing, and axolotl has no default; give it")
        rank = int(a.assume("finetune.lora.rank", usual, "rank"))
    alpha = a.keys.number("lora_alpha", 0, LARGEST)
    if alpha is None:
        alpha = float(
            a.assume("finetune.lora.alpha", a.default("lora_alpha") or 2 * rank, "lora_alpha")
        )
    found: dict[str, Any] = {"rank": rank, "alpha": alpha, "rslora": a.flag("rslora")}
    dropout = a.number("lora_dropout", "finetune.lora.dropout")
    if paired and dropout:
        if a.has("lora_dropout"):
            a.keys.mark_untranslated("lora_dropout", DROPPED)
        a.keys.assumed[:] = [n for n in a.keys.assumed if n.field != "finetune.lora.dropout"]
        dropout = 0.0
    return {**found, "dropout": dropout, "targets": _targets(a)}


def _targets(a: Arguments) -> str | list[str]:
    key = a.key("targets")
    said = a.keys.take(key)
    linear = a.keys.flag("lora_target_linear")
    names = said.replace(" ", "").split(",") if isinstance(said, str) else said
    legal = f"legal: {', '.join(ALL)}, {', '.join(TARGETS)}"
    if not isinstance(names, list | NoneType):
        raise refuse(key, f"is {shown(names)}; {legal}")
    if linear or (names and any(name in ALL for name in names)):
        return "all"
    if not names:
        if a.default("targets") in ALL:
            return str(
                a.keys.assume("finetune.lora.targets", "all", f"{a.dialect.whose}'s default")
            )
        return a.keys.assume(  # type: ignore[no-any-return]
            "finetune.lora.targets",
            ["attention.q", "attention.v"],
            "PEFT's default for Llama, Mistral, Qwen and OPT",
        )
    for name in names:
        if not isinstance(name, str) or name not in TARGETS:
            raise refuse(
                key,
                f"names {shown(name)}, which is no linear layer of a block that a plan adapts "
                f"(embeddings, head and routers have none); {legal}",
            )
    return list(dict.fromkeys(pattern for name in names for pattern in TARGETS[name]))


def quantize(a: Arguments, adapters: bool) -> dict[str, Any] | None:
    """The plan's `quantize` section; None where the base is in 16 bits or more."""
    axolotl, bits = a.dialect.format == "axolotl", a.keys.integer("quantization_bit")
    four = a.keys.flag("load_in_4bit") or bits == 4
    if axolotl and not four and a.keys.value("adapter") == "qlora":
        raise refuse("load_in_4bit", "is not true, and axolotl's qlora needs it; legal: true")
    if bits not in (None, 4):
        raise refuse("quantization_bit", f"is {bits}; a plan's base has 4 bits or 16; legal: 4")
    if not four:
        return None
    if not adapters:
        raise refuse(
            "quantization_bit" if bits else "load_in_4bit",
            "is set without adapters, and what has 4 bits is not trained; legal: with LoRA",
        )
    if a.keys.flag("quantization_device_map") or a.word("quantization_method") not in (
        None,
        "bnb",
        "bitsandbytes",
    ):
        raise refuse(
            "quantization_method",
            "is not bitsandbytes, whose nf4 finetune.quantize says; legal: bnb",
        )
    section = "bnb_config_kwargs."
    kind = a.key("quant_type") if not axolotl else f"{section}bnb_4bit_quant_type"
    double_key = a.key("double") if not axolotl else f"{section}bnb_4bit_use_double_quant"
    word = a.keys.choice(kind, {"nf4": "nf4", "fp4": "fp4"})
    if word == "fp4":
        a.keys.mark_untranslated(kind, "a plan's 4 bits are nf4 or int4: nf4 taken, as large")
    double = a.keys.flag(double_key)
    if double is None:
        usual = True if axolotl else bool(a.default("double"))
        double = a.keys.assume("finetune.quantize.double", usual, f"{a.dialect.whose}'s default")
    return {"format": "nf4", "group": 64, "double": double}
