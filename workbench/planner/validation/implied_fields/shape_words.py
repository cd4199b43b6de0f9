"""What the words of a row say of its model: experts, latent attention, windows, norms, biases."""

from __future__ import annotations

import re
from typing import Any

from workbench.plan.model.model_shape import Shape
from workbench.planner.validation.measured_rows import MeasuredRow

UNSUPPORTED_ARCHITECTURES = (
    (
        "not a decoder",
        r"\b(bert|encoder|t5|vit|diffusion|dit|clip|resnet|vision|whisper|cnn|unet)\b|classif",
    ),
    (
        "state-space or hybrid layers",
        r"mamba|\bssm\b|state.space|rwkv|hybrid attention|linear attention|nemotron[_ ]?v?3",
    ),
)
"""(reason, words that give it away): models that no `Shape` of ours describes."""
QKV_BIASES = r"qkv.?bias|qwen2"
"""Words of biases of queries, keys and values alone, which Qwen 2 has."""
MLA_WIDTHS = (
    ("kv_rank", r"kv[-_ ]lora[-_ ]rank"),
    ("q_rank", r"\bq[-_ ]lora[-_ ]rank"),
    ("rope_dim", r"qk[-_ ]rope[-_ ]head[-_ ]dim|qk[-_ ]pos[-_ ]emb[-_ ]head[-_ ]dim"),
    ("nope_dim", r"qk[-_ ]nope[-_ ]head[-_ ]dim|qk[-_ ]head[-_ ]dim"),
    ("value_dim", r"v[-_ ]head[-_ ]dim"),
)
"""Field of latent attention, and how Hugging Face's configurations and Megatron-LM call it."""


def unsupported_architecture(row: MeasuredRow) -> str | None:
    """Why no shape describes the row's model; None where one may."""
    words = _model_words(row)
    return next(
        (reason for reason, pattern in UNSUPPORTED_ARCHITECTURES if re.search(pattern, words)), None
    )


def has_experts(row: MeasuredRow) -> bool:
    """Whether the row is about a mixture of experts."""
    return (
        bool(row.experts)
        or re.search(r"\bmoe\b|mixture|experts", _model_words(row).replace("_", " ")) is not None
    )


def has_latent_attention(row: MeasuredRow) -> bool:
    """Whether the row says that its attention is latent (MLA)."""
    return re.search(r"\bmla\b|latent attention", _model_words(row)) is not None


def has_window(row: MeasuredRow) -> bool:
    """Whether the row says that its attention has a sliding window."""
    words = re.sub(r"\b(no|without|not) (sliding )?(attention )?windows?", " ", _model_words(row))
    return re.search(r"sliding|\bwindow", words) is not None


def window_in_words(row: MeasuredRow) -> int | None:
    """Size of the window that all layers have, tokens, where the row says one."""
    said = re.search(r"window\D{0,12}(\d{2,7})\b", _model_words(row)) if has_window(row) else None
    return int(said.group(1)) if said else None


def predicts_further_token(row: MeasuredRow) -> bool:
    """Whether the model has a layer that predicts the token after the next (MTP, arXiv 2412.19437).

    "MTP unless stated" in the architecture speaks of rows without a word of it elsewhere.
    """
    named, arch = f"{row.model} {row.notes}".lower(), row.arch.lower()
    if re.search(r"(w/o|without|\bno) mtp", named):
        return False
    return re.search(r"\bmtp\b", f"{named} {arch}") is not None


def leaves_mtp_open(row: MeasuredRow) -> bool:
    """Whether only the reader of the row's page took its model to predict a further token."""
    stated = re.search(r"\bmtp\b", f"{row.model} {row.notes}".lower())
    return "mtp unless stated" in row.arch.lower() and not stated


def moe_in_words(row: MeasuredRow, published: Shape | None) -> dict[str, Any] | None:
    """The mixture of experts by columns and words of the row, else as the published model has it;
    None where experts, top-k or the width of one stay open.
    """
    arch, known = row.arch.lower(), published.moe if published else None
    width = re.search(
        r"(?:moe|expert)[-_ ](?:ffn|intermediate|hidden)(?:[-_ ](?:hidden|size))*\D{0,3}(\d+)", arch
    )
    ffn = int(width.group(1)) if width else known.ffn if known else None
    if not (row.experts and row.top_k and ffn):
        return None
    shared, dense = re.search(r"(\d+) shared", arch), re.search(r"(\d+) dense", arch)
    return {
        "experts": row.experts,
        "top_k": row.top_k,
        "ffn": ffn,
        "shared": int(shared.group(1)) if shared else known.shared if known else 0,
        "first_dense": int(dense.group(1)) if dense else known.first_dense if known else 0,
    }


def mla_in_words(row: MeasuredRow) -> dict[str, int] | None:
    """Widths of latent attention that the row's words give; None where they do not give all of
    them. Queries need not be compressed.
    """
    words = f"{row.arch} {row.notes}".lower()
    found = {
        field: int(said.group(1))
        for field, pattern in MLA_WIDTHS
        if (said := re.search(rf"(?:{pattern})\W{{0,3}}(\d+)", words))
    }
    return found if {field for field, _ in MLA_WIDTHS} - {"q_rank"} <= set(found) else None


def names_biases(arch: str) -> bool:
    """Whether a row says which biases its model has; else a published model's own count."""
    return "bias" in arch.lower() or re.search(QKV_BIASES, arch.lower()) is not None


def block_style(arch: str, gated: bool) -> dict[str, Any]:
    """Norms, positions and biases: those of GPT without a gate, of Llama with one, but for what
    `arch` says.
    """
    positions = next(
        (name for name in ("alibi", "rope", "learned") if name in arch),
        "rope" if gated else "learned",
    )
    mlp = (
        ("geglu" if "geglu" in arch else "swiglu")
        if gated
        else "relu"
        if "relu" in arch
        else "gelu"
    )
    if re.search(QKV_BIASES, arch):
        biases = "qkv"
    elif re.search(r"no bias|without bias|bias.?free", arch):
        biases = "none"
    else:
        biases = "none" if gated and "bias" not in arch else "all"
    return {
        "positions": positions,
        "mlp": mlp,
        "biases": biases,
        "norm": "rmsnorm" if gated else "layernorm",
        "embedding_norm": re.search(r"embedding (ln|norm|layernorm)", arch) is not None,
    }


def _model_words(row: MeasuredRow) -> str:
    return f"{row.arch} {row.model}".lower()
