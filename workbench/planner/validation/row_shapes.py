"""A row's model as a `Shape`, or why it cannot be one."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import lru_cache
from typing import Any

from workbench.plan.model.model_shape import Shape
from workbench.plan.model.parameter_count import parameters
from workbench.planner.validation.implied_fields import shape_words
from workbench.planner.validation.implied_fields.published_models import (
    published_model,
    with_published_shape,
)
from workbench.planner.validation.measured_rows import MeasuredRow

REQUIRED_FIELDS = ("layers", "hidden", "heads", "sequence")
MAX_LAYER_ROUNDING = 0.25
"""Share of a layer by which the layers that a printed count of parameters implies may miss a whole
number.
"""


class Inexpressible(Exception):
    """Why a row cannot be said as a plan; the message is the reason that rows are counted by."""


def is_dense(row: MeasuredRow) -> bool:
    """Whether the row is about a dense decoder: no experts, and none of the architectures in
    `shape_words.UNSUPPORTED_ARCHITECTURES`.
    """
    return (
        not shape_words.has_experts(with_published_shape(row))
        and shape_words.unsupported_architecture(row) is None
    )


def is_moe(row: MeasuredRow) -> bool:
    """Whether the row is about a mixture of experts, of whatever other architecture."""
    return shape_words.has_experts(with_published_shape(row))


def missing_fields(row: MeasuredRow) -> list[str]:
    """Fields without which no shape can be made, that the row leaves open and nothing implies."""
    row = completed(row)
    absent = [name for name in REQUIRED_FIELDS if getattr(row, name) is None]
    if row.vocab is None and row.parameters is None:
        absent.append("vocab")
    if row.ffn is None and row.gated is not False:
        absent.append("ffn")
    return absent


def completed(row: MeasuredRow) -> MeasuredRow:
    """`row`, with the fields of its shape that the model it names or its count of parameters
    imply.
    """
    row = with_published_shape(row)
    return replace(row, layers=implied_layers(row)) if row.layers is None else row


def is_shape_inferred(row: MeasuredRow) -> bool:
    """Whether the row's layers are neither its own nor those of the published model that it names,
    but what its count of parameters implies; or whether one of them predicts a further token.
    """
    named = row.layers is not None or published_model(row) is not None
    implied = not named and completed(row).layers is not None
    return implied or shape_words.leaves_mtp_open(row)


def is_layout_inferred(row: MeasuredRow) -> bool:
    """Whether the row leaves open over how many of several GPUs its experts are spread."""
    return is_moe(row) and (row.gpus or 1) > 1 and not row.says_expert


def row_shape(row: MeasuredRow) -> Shape:
    """The shape that the row describes. Raises `Inexpressible`."""
    if other := shape_words.unsupported_architecture(row):
        raise Inexpressible(f"not a dense decoder: {other}")
    if absent := missing_fields(row):
        raise Inexpressible(f"missing {absent[0]}")
    entry, row = published_model(row), completed(row)
    published = entry.shape if entry else None
    moe = _moe_fields(row, published)
    more = {**_attention_fields(row, published), **({"moe": moe} if moe else {})}
    if published is not None and not shape_words.names_biases(row.arch):
        more["biases"] = published.biases
    more["mtp_layers"] = int(shape_words.predicts_further_token(row))
    return _build_shape(
        row.model,
        row.arch.lower(),
        (row.layers or 0) + more["mtp_layers"],
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
        json.dumps(more),
    )


def implied_layers(row: MeasuredRow) -> int | None:
    """Layers that make up the printed number of parameters of a dense model; None where its widths
    are open or make no model, or no whole number of them does.
    """
    if not (row.parameters and row.hidden and row.heads and row.vocab) or row.experts:
        return None
    if row.ffn is None and row.gated is not False:
        return None
    try:
        one, two = (_parameters_of(row, layers) for layers in (1, 2))
    except Inexpressible:  # its widths make no model; who builds its shape says so
        return None
    layers = 1 + (row.parameters - one) / (two - one)
    found = round(layers)
    return found if found >= 1 and abs(layers - found) <= MAX_LAYER_ROUNDING else None


def _parameters_of(row: MeasuredRow, layers: int) -> int:
    """Parameters of a dense model of so many layers, whose other widths the row gives."""
    hidden = row.hidden or 0
    return parameters(
        _build_shape(
            row.model,
            row.arch.lower(),
            layers,
            hidden,
            row.heads or 0,
            row.kv_heads,
            row.head_dim,
            row.ffn or 4 * hidden,
            row.vocab,
            row.sequence or 1,
            bool(row.tied),
            row.gated,
            None,
            "{}",
        )
    ).total


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
    more: str,
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
        **shape_words.block_style(arch, gated),
        **json.loads(more),
    }
    try:
        if vocab is None:
            written["vocab"] = _vocab_from_parameters(written, tied, total or 0)
        found = Shape.model_validate({**written, "tied": bool(tied)})
    except ValueError:
        raise Inexpressible("impossible shape") from None
    return found if tied is not None or total is None else _nearest_tie(found, total)


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


def _moe_fields(row: MeasuredRow, published: Shape | None) -> dict[str, Any] | None:
    """The mixture of experts as a shape has it; None for a dense model. Raises `Inexpressible`."""
    if not shape_words.has_experts(row):
        return None
    moe = shape_words.moe_in_words(row, published)
    if moe is None:
        raise Inexpressible("mixture of experts: experts, top-k or width of an expert missing")
    if re.search(r"token.?drop", row.text):
        moe["capacity"] = 1  # NeMo and Megatron-Bridge: moe_expert_capacity_factor 1.0, padded
    return moe


def _attention_fields(row: MeasuredRow, published: Shape | None) -> dict[str, Any]:
    """Latent attention and windows, by the row's words or as the published model has them. Raises
    `Inexpressible` where a row says that it has them, and nothing how wide they are.
    """
    found: dict[str, Any] = {}
    mla = shape_words.mla_in_words(row)
    if mla is None and published and published.mla:
        mla = published.mla.model_dump()
    if mla is None and shape_words.has_latent_attention(row):
        raise Inexpressible("latent attention of unknown widths")
    if mla:
        found["mla"] = mla
    window, every = shape_words.window_in_words(row), None
    if window is None and published:
        window, every = published.window, published.full_attention_every
    if window is None and shape_words.has_window(row):
        raise Inexpressible("sliding window of unknown size")
    if window is not None:
        found |= {"window": window, "full_attention_every": every}
    return found
