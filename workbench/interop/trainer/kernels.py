"""Kernels, loss, recomputation and attention that a trainer's arguments name."""

from __future__ import annotations

from workbench.errors import refuse
from workbench.interop.trainer.arguments import Arguments
from workbench.machine import gpu_catalog
from workbench.machine.hardware import GPU
from workbench.plan.model.attention_kernel import framework_attention
from workbench.untrusted_text import shown

SDPA = "the Trainer's default: torch's sdpa, FlashAttention-2 where no mask pads"
_ATTENTION = {
    "eager": "unfused",
    "disabled": "unfused",
    "sdpa": "flash-2",
    "auto": "flash-2",
    "flex_attention": "flash-2",
    "xformers": "efficient",
    "flash_attention_2": "flash-2",
    "fa2": "flash-2",
    "flash_attention_3": "flash-3",
    "fa3": "flash-3",
    "flash_attention_4": "flash-4",
    "fa4": "flash-4",
}
"""Attention of transformers, LLaMA-Factory and axolotl -> the plan's."""
_SWITCHES = {
    "flash_attention": "flash_attention_2",
    "xformers_attention": "xformers",
    "flex_attention": "flex_attention",
    "sdp_attention": "sdpa",
    "eager_attention": "eager",
}
"""axolotl's switch -> the kernel that it turns on."""
_LIGER = ("rope", "rms_norm", "glu_activation", "swiglu", "layer_norm")
"""Parts of axolotl's liger plugin that are memory-bound operators."""
_OFFLOADED = ("offload", "offload_disk", "unsloth")


def kernels_of(a: Arguments, otherwise: str) -> tuple[str, str | None]:
    """(kernels of memory-bound operators, the loss; None: the stack's own)."""
    keys = a.keys
    compiled = str(keys.take("torch_compile")).lower() == "true"
    kernels, loss = ("compiled" if compiled else otherwise), None
    if keys.flag(a.key("liger")):
        kernels, loss = "liger", "fused_linear"
    if a.dialect.format == "axolotl":
        fused = [keys.flag(f"liger_{part}") for part in _LIGER]
        kernels = "liger" if any(fused) else kernels
        cut = keys.flag("cut_cross_entropy")
        if cut is None:  # the plugin's own default
            cut = "CutCrossEntropyPlugin" in str(keys.value("plugins"))
        if keys.flag("liger_fused_linear_cross_entropy") or cut:
            loss = "fused_linear"
        elif keys.flag("chunked_cross_entropy"):
            loss = "chunked"
    return kernels, loss


def recompute_of(a: Arguments, by_fsdp: bool) -> str:
    """full or none; FSDP's own switch (`by_fsdp`) recomputes the same layers."""
    key = a.key("recompute")
    if a.dialect.format == "llama-factory":
        a.keys.take(key)  # on in any case, but for the next
        off = a.keys.flag("disable_gradient_checkpointing")
        if off is None:
            return str(a.keys.assume("strategy.recompute", "full", "LLaMA-Factory's default"))
        return "none" if off and not by_fsdp else "full"
    said = a.keys.take(key)
    word = str(said).lower()
    if said is None and not by_fsdp:
        usual = "full" if a.default("recompute") else "none"
        return str(a.assume("strategy.recompute", usual, "recompute"))
    if word in _OFFLOADED:
        a.keys.mark_untranslated(
            key,
            "inputs of layers wait in host memory; an estimate keeps 2 bytes x tokens x hidden x "
            "layers of them on the GPU",
        )
    elif word not in ("true", "false", "none"):
        raise refuse(key, f"is {shown(said)}; legal: true, false, {', '.join(_OFFLOADED)}")
    return "full" if by_fsdp or word in ("true", *_OFFLOADED) else "none"


def attention_of(a: Arguments, gpu: str | GPU | None) -> str:
    """The kernel of attention that the file names, or sdpa's."""
    word = a.word("attention")
    if a.dialect.format == "axolotl":
        on = [name for name in _SWITCHES if a.keys.flag(name)]
        word = word or (_SWITCHES[on[0]] if on else None)
    if a.dialect.format == "hf-trainer" and a.keys.flag("use_flash_attention_2"):
        word = "flash_attention_2"
    if word in (None, "auto", "sdpa", "flex_attention"):
        return str(a.keys.assume("strategy.attention", _by_torch(gpu), SDPA))
    if word.startswith("kernels-community/"):
        number = next((n for n in "43" if f"attn{n}" in word), "2")
        return f"flash-{number}"
    if word not in _ATTENTION:
        raise refuse(a.key("attention"), f"is {shown(word)}; legal: {', '.join(_ATTENTION)}")
    return _ATTENTION[word]


def _by_torch(gpu: str | GPU | None) -> str:
    """Attention that torch's sdpa chooses on a GPU."""
    entry = gpu_catalog.gpus().get(gpu) if isinstance(gpu, str) else None
    known = entry.gpu if entry else gpu if isinstance(gpu, GPU) else None
    return "flash-2" if known is None or "flash-2" in framework_attention(known) else "efficient"
