"""A row's model as a `Shape`, or why it cannot be one."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from workbench.plan.model.model_shape import Shape
from workbench.plan.model.parameter_count import parameters
from workbench.planner.validation.cell_parsers import positive_integer
from workbench.planner.validation.measured_rows import MeasuredRow

UNSUPPORTED_ARCHITECTURES = (
    (
        "not a decoder",
        r"\b(bert|encoder|t5|vit|diffusion|dit|clip|resnet|vision|whisper|cnn|unet)\b|classif",
    ),
    (
        "state-space or hybrid layers",
        r"mamba|\bssm\b|state.space|rwkv|hybrid attention|linear attention|nemotron_?3",
    ),
    ("sliding window", r"sliding|window"),
)
"""(reason, words that give it away): models that no `Shape` of ours describes."""
REQUIRED_FIELDS = ("layers", "hidden", "heads", "sequence")


class Inexpressible(Exception):
    """Why a row cannot be said as a plan; the message is the reason that rows are counted by."""


def is_dense(row: MeasuredRow) -> bool:
    """Whether the row is about a dense decoder: no experts, and none of the architectures in
    `UNSUPPORTED_ARCHITECTURES`.
    """
    return not _has_experts(row) and _unsupported_architecture(row) is None


def missing_fields(row: MeasuredRow) -> list[str]:
    """Fields without which no shape can be made, that the row leaves open and nothing implies."""
    absent = [name for name in REQUIRED_FIELDS if getattr(row, name) is None]
    if row.vocab is None and row.parameters is None:
        absent.append("vocab")
    if row.ffn is None and row.gated is not False:
        absent.append("ffn")
    return absent


def row_shape(row: MeasuredRow) -> Shape:
    """The shape that the row describes. Raises `Inexpressible`."""
    if other := _unsupported_architecture(row):
        raise Inexpressible(f"not a dense decoder: {other}")
    if absent := missing_fields(row):
        raise Inexpressible(f"missing {absent[0]}")
    moe = _moe_fields(row)
    if re.search(r"token.?drop", row.text) and moe:
        moe["capacity"] = 1  # NeMo and Megatron-Bridge: moe_expert_capacity_factor 1.0, padded
    return _build_shape(
        row.model,
        row.arch.lower(),
        row.layers or 0,
        row.hidden or 0,
        row.heads or 0,
        row.kv_heads,
        row.head_dim,
        row.ffn or 4 * (row.hidden or 0),
        row.vocab,
        row.sequence or 0,
        row.tied,
        row.gated,
        row.parameters,
        tuple(sorted(moe.items())),
    )


@lru_cache(maxsize=4096)
def _build_shape(
    model: str,
    arch: str,
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int | None,
    head_dim: int | None,
    ffn: int,
    vocab: int | None,
    sequence: int,
    tied: bool | None,
    gated: bool | None,
    total: float | None,
    moe: tuple[tuple[str, int], ...],
) -> Shape:
    gated = bool(gated if gated is not None else re.search("llama|qwen|mistral|glu", arch))
    written: dict[str, Any] = {
        "name": model or "unnamed",
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "ffn": ffn,
        "vocab": vocab or 256,
        "max_positions": sequence,
        **_block_style(arch, gated),
        "moe": dict(moe) or None,
    }
    try:
        if vocab is None:
            written["vocab"] = _vocab_from_parameters(written, tied, total or 0)
        found = Shape.model_validate({**written, "tied": bool(tied)})
    except ValueError:
        raise Inexpressible("impossible shape") from None
    return found if tied is not None or total is None else _nearest_tie(found, total)


def _block_style(arch: str, gated: bool) -> dict[str, Any]:
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
    if re.search(r"qkv.?bias|qwen2", arch):
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


def _vocab_from_parameters(written: dict[str, Any], tied: bool | None, total: float) -> int:
    """Vocabulary that makes up the stated number of parameters, to a multiple of 128."""
    blocks = parameters(Shape.model_validate({**written, "tied": True})).total
    tables = 1 if tied or tied is None else 2
    rows = 256 + (total - blocks) / (tables * written["hidden"])
    if not 1000 <= rows <= 1_000_000:
        raise Inexpressible("missing vocab")
    vocab: int = round(rows / 128) * 128
    return vocab


def _nearest_tie(found: Shape, total: float) -> Shape:
    """Tied or not, whichever comes nearer to the stated number of parameters; they often differ by
    a tenth.
    """
    other = found.model_copy(update={"tied": not found.tied})
    return min((found, other), key=lambda shape: abs(parameters(shape).total - total))


def _unsupported_architecture(row: MeasuredRow) -> str | None:
    words = f"{row.arch} {row.model}".lower()
    return next(
        (reason for reason, pattern in UNSUPPORTED_ARCHITECTURES if re.search(pattern, words)), None
    )


def _has_experts(row: MeasuredRow) -> bool:
    return (
        bool(row.experts)
        or re.search(r"\bmoe\b|mixture|experts", f"{row.arch} {row.model}".lower()) is not None
    )


def _moe_fields(row: MeasuredRow) -> dict[str, int]:
    """The mixture of experts as a shape has it, read from the row's columns and its words."""
    if not _has_experts(row):
        return {}
    arch = row.arch.lower()
    if "mla" in arch:
        raise Inexpressible(
            "mixture of experts: latent attention, whose widths are not in the schema"
        )
    width = re.search(r"(?:moe_ffn|expert_ffn)\D{0,3}(\d+)", arch)
    ffn = positive_integer(width.group(1)) if width else None
    if not (row.experts and row.top_k and ffn):
        raise Inexpressible("mixture of experts: experts, top-k or width of an expert missing")
    shared, dense = re.search(r"(\d+) shared", arch), re.search(r"(\d+) dense", arch)
    return {
        "experts": row.experts,
        "top_k": row.top_k,
        "ffn": ffn,
        "shared": int(shared.group(1)) if shared else 0,
        "first_dense": int(dense.group(1)) if dense else 0,
    }
