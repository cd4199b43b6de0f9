"""Precision of a trainer's run: what products are computed in, and what the weights are kept in."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from workbench.errors import refuse
from workbench.interop.trainer.arguments import Arguments
from workbench.machine import gpu_catalog
from workbench.machine.hardware import GPU
from workbench.untrusted_text import shown

_DTYPES = {
    "float32": "fp32",
    "fp32": "fp32",
    "bfloat16": "bf16",
    "bf16": "bf16",
    "float16": "fp16",
    "fp16": "fp16",
    "half": "fp16",
    "auto": "auto",
}
SIXTEEN_BIT = "hf-trainer-16bit"
"""Profile of a Trainer whose weights are loaded in 16 bits."""
AUTOCAST = "hf-trainer"
"""Profile of a Trainer that computes in 16 bits over fp32 weights."""


_WIDE = (
    "trained weights in fp32, computed with in 16 bits: 16 bytes a parameter and 2 for the copy; "
    "loaded in bf16 all of them are 8"
)
_WIDE_BASE = (
    "the base in fp32, where an estimate has 16 bits, or 4 of its blocks: + 2 bytes x parameters "
    "that have not 4"
)


@dataclass(frozen=True)
class Precision:
    """Precision of products, and whether trained weights are kept in fp32 beside them."""

    computed: str
    wide: bool

    def unsharded(self, tune: dict[str, Any]) -> dict[str, Any]:
        """Fields of the strategy of plain data parallelism; those of the optimizer are put into
        `tune`.
        """
        if self.wide or self.computed in ("fp32", "tf32") or tune["method"] != "full":
            return {"stack": AUTOCAST, "precision": self.computed, "gradient_dtype": "fp32"}
        tune["optimizer"] |= {"master": "none"}
        tune["optimizer"].setdefault("moments", "bf16")
        return {"stack": SIXTEEN_BIT, "precision": self.computed, "gradient_dtype": "parameters"}


def precision_of(a: Arguments, method: str, gpu: str | GPU | None) -> Precision:
    """Precision of the products and of trained weights. Raises `PlanError` where two are named."""
    mixed = _mixed(a, gpu)
    if a.dialect.format == "axolotl":
        found = _axolotl(a, mixed)
    elif a.dialect.format == "llama-factory":
        found = _llama_factory(a, mixed, method)
    else:
        found = _hugging_face(a, mixed, method)
    if not a.keys.flag("fp8"):
        return found
    a.keys.assumed[:] = [n for n in a.keys.assumed if n.field != "strategy.precision"]
    return replace(found, computed="fp8")


def _mixed(a: Arguments, gpu: str | GPU | None) -> str:
    """Precision that the Trainer computes in: bf16 or fp16 by autocast, else fp32."""
    half, wanted = a.keys.flag("fp16"), a.keys.take("bf16")
    word = str(a.default("bf16") if wanted is None and not half else wanted).lower()
    if word == "auto":
        return "bf16" if _has_bf16(gpu) else "fp16"
    if word not in ("true", "false", "full", "none"):
        raise refuse("bf16", f"is {shown(wanted)}; legal: true, false, auto")
    on = word in ("true", "full")
    if on and half:
        raise refuse("fp16", "is true beside bf16; legal: one of them")
    found = "fp16" if half else "bf16" if on else "fp32"
    if wanted is None and not half:
        a.assume("strategy.precision", found, "bf16")
    return found


def _has_bf16(gpu: str | GPU | None) -> bool:
    """True where a GPU has bf16, as axolotl's auto asks; one that is not known has."""
    entry = gpu_catalog.gpus().get(gpu) if isinstance(gpu, str) else None
    known = entry.gpu if entry else gpu if isinstance(gpu, GPU) else None
    return known is None or "bf16" in known.tflops


def _axolotl(a: Arguments, mixed: str) -> Precision:
    """axolotl loads the weights in the precision that it computes in."""
    pure = "bf16" if a.keys.flag("bfloat16") else "fp16" if a.keys.flag("float16") else None
    computed = pure or mixed
    return Precision(_wide(a, computed), computed == "fp32")


def _llama_factory(a: Arguments, mixed: str, method: str) -> Precision:
    """LLaMA-Factory makes trained weights fp32, but for pure_bf16."""
    if a.keys.flag("pure_bf16"):
        return Precision("bf16", False)
    if mixed == "fp32" and method == "lora":
        a.keys.assumed[:] = [n for n in a.keys.assumed if n.field != "strategy.precision"]
        a.keys.assume(
            "strategy.precision", "bf16", "LLaMA-Factory loads a frozen base in bf16 by itself"
        )
        return Precision("bf16", True)
    return Precision(_wide(a, mixed), True)


def _hugging_face(a: Arguments, mixed: str, method: str) -> Precision:
    key = a.key("dtype")
    said = a.keys.choice(key, _DTYPES)
    kept = {None: "fp32", "auto": "bf16"}.get(said, said)
    if said == "auto":
        a.keys.assume(key, "bfloat16", "the checkpoint's own dtype, taken as bf16")
    if kept == "fp32" and mixed != "fp32":
        why = _WIDE_BASE if method == "lora" else _WIDE
        if said is None:
            a.keys.assume(key, "float32", f"TRL's default: {why}")
        elif method == "lora":
            a.keys.mark_untranslated(key, why)
    if mixed == "fp32" and kept != "fp32":
        return Precision(kept, False)
    return Precision(_wide(a, mixed), kept == "fp32")


def _wide(a: Arguments, computed: str) -> str:
    """TF32 where products of fp32 are computed so."""
    if computed != "fp32" or a.keys.take("tf32") in (None, False, "auto", "false"):
        return computed
    return "tf32"
