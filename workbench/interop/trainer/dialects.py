"""How Hugging Face's trainers, LLaMA-Factory and axolotl spell one set of arguments, which names
each has, and what each takes where a file says nothing.

Names and defaults are those of `data/foreign/trainer_arguments.yaml`, with their versions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from workbench.data_files import read_data_file

TrainerFormat = Literal["hf-trainer", "llama-factory", "axolotl"]

_SHARED: dict[str, tuple[str, ...]] = {
    "dtype": ("dtype", "torch_dtype"),
    "attention": ("attn_implementation",),
    "length": ("max_length", "max_seq_length", "block_size"),
    "micro": ("per_device_train_batch_size", "per_gpu_train_batch_size"),
    "epochs": ("num_train_epochs",),
    "model": ("model_name_or_path",),
    "evaluation": ("eval_strategy", "evaluation_strategy"),
    "rank": ("lora_r",),
    "targets": ("lora_target_modules",),
    "rslora": ("use_rslora",),
    "double": ("use_bnb_nested_quant",),
    "quant_type": ("bnb_4bit_quant_type",),
    "liger": ("use_liger_kernel", "use_liger"),
    "beta": ("beta",),
    "loss": ("loss_type",),
    "recompute": ("gradient_checkpointing", "activation_checkpointing"),
}
"""What an argument means -> Hugging Face's name for it, then its older ones; what is not listed has
one name everywhere.
"""
SPELLING: dict[TrainerFormat, dict[str, tuple[str, ...]]] = {
    "hf-trainer": _SHARED,
    "llama-factory": {
        **_SHARED,
        "attention": ("flash_attn",),
        "length": ("cutoff_len",),
        "rank": ("lora_rank",),
        "targets": ("lora_target",),
        "double": ("double_quantization",),
        "quant_type": ("quantization_type",),
        "liger": ("enable_liger_kernel",),
        "beta": ("pref_beta", "dpo_beta"),
        "loss": ("pref_loss", "dpo_loss"),
    },
    "axolotl": {
        **_SHARED,
        "model": ("base_model",),
        "micro": ("micro_batch_size",),
        "length": ("sequence_len",),
        "epochs": ("num_epochs",),
        "optim": ("optimizer",),
        "lr_scheduler_type": ("lr_scheduler",),
        "packing": ("sample_packing",),
        "rslora": ("peft_use_rslora",),
        "beta": ("rl_beta", "dpo_beta"),
        "loss": ("dpo_loss_type",),
    },
}
FRAMEWORKS: dict[TrainerFormat, str] = {
    "hf-trainer": "the Trainer",
    "llama-factory": "LLaMA-Factory",
    "axolotl": "axolotl",
}
"""Whose default it is, in a note."""


@dataclass(frozen=True)
class Dialect:
    """One format's names and defaults; `trainer` is SFT's or DPO's own ("": Hugging Face's Trainer
    itself).
    """

    format: TrainerFormat
    trainer: str
    known: frozenset[str]
    """Names that a file may hold."""
    foreign: Mapping[str, str]
    """Name that only another trainer has -> that trainer."""
    defaults: Mapping[str, Any]
    """By the name that the format has today."""

    @property
    def whose(self) -> str:
        """Whose defaults they are."""
        return f"TRL ({self.trainer})" if self.trainer else FRAMEWORKS[self.format]


def spellings(format: TrainerFormat, name: str) -> tuple[str, ...]:
    """The names that `format` has for what is meant by `name`, today's first."""
    return SPELLING[format].get(name, (name,))


@lru_cache(maxsize=1)
def _tables() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = read_data_file("data/foreign/trainer_arguments.yaml")
    return [{**row, "names": frozenset(row["names"].split())} for row in rows]


@lru_cache(maxsize=8)
def dialect(format: TrainerFormat, trainer: str = "") -> Dialect:
    """The names and defaults of a format, of Hugging Face's with those of TRL's `trainer`."""
    shared = ("transformers",) if format != "axolotl" else ()
    tables = [t for t in _tables() if t["format"] == format or t["framework"] in shared]
    own = [t for t in tables if t.get("trainer") in (None, "SFT", "DPO")]
    known = frozenset[str]().union(*(table["names"] for table in own))
    counted = [t for t in own if trainer or format != "hf-trainer" or t["framework"] in shared]
    counted = [t for t in counted if t.get("trainer") in (None, trainer)]
    defaults = {key: value for t in counted for key, value in t.get("defaults", {}).items()}
    others = {n: t["trainer"] for t in tables if t not in own for n in t["names"]}
    return Dialect(format, trainer, known, others, defaults)


def trl_names(*trainers: str) -> frozenset[str]:
    """Names that TRL has, and neither `TrainingArguments` nor scripts that are not TRL's: those of
    `trainers` alone, where they are named.
    """
    wanted = [
        t["names"]
        for t in _tables()
        if t["framework"] == "trl" and (t.get("trainer") in trainers if trainers else True)
    ]
    own = [t for t in _tables() if t["format"] == "hf-trainer"]
    others = [t["names"] for t in own if t["framework"] != "trl"]
    return frozenset[str]().union(*wanted) - frozenset[str]().union(*others)
