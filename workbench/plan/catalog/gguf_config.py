"""The shape of the model in a GGUF file, from its metadata.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; defaults are those of llama.cpp.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from workbench.errors import refuse
from workbench.fields.validation_messages import plan_error
from workbench.plan.catalog.gguf_architectures import ARCHITECTURES
from workbench.plan.catalog.gguf_keys import BLOOM_NEUTRAL, ELSEWHERE, IGNORED, KIND, NEUTRAL, SPLIT
from workbench.plan.catalog.gguf_rotary import DIVISORS, read_llama3, read_scaling, write_scaling
from workbench.plan.catalog.huggingface_keys import Account, Reading
from workbench.plan.model.model_shape import Shape
from workbench.safe_io.gguf_files import GgufFile, open_gguf
from workbench.untrusted_text import shown


def read_gguf_config(path: str | Path, field: str = "model") -> Shape:
    """The shape that a GGUF file describes.

    What it computes beyond the fields of a shape (stretched rotary frequencies, say) becomes the
    shape's `unmodelled`.

    Raises:
        PlanError: Names `field`, and what is wrong with the file.
    """
    return gguf_shape(open_gguf(path, field), field)


def gguf_account(path: str | Path) -> Account:
    """Account of what `read_gguf_config` makes of each metadata key of the file but its
    tokenizer's. Raises `PlanError` as it does.
    """
    file = open_gguf(path)
    reading = _reading(file, "model")
    _fields(file, reading)
    return reading.tried_account(partial(_fields, file))


def gguf_shape(file: GgufFile, field: str = "model") -> Shape:
    """The shape of an open GGUF file; raises as `read_gguf_config` does."""
    reading = _reading(file, field)
    fields = _fields(file, reading)
    fields["unmodelled"] = "; ".join(reading.account().not_modelled.values()) or None
    try:
        return Shape.model_validate(fields)
    except ValidationError as error:
        why = plan_error(error, fields, Shape)
        raise refuse(field, f"'{file.path}' describes no model: {why.first}") from None


def _reading(file: GgufFile, field: str) -> Reading:
    """The metadata of a file but its tokenizer's, to be read."""
    architecture, legal = file.get(KIND), [*ARCHITECTURES]
    if architecture not in legal:
        why = f"has {KIND} {shown(architecture)}; legal: {', '.join(legal)}"
        raise refuse(field, f"'{file.path}' {why}")
    if (files := file.get(SPLIT, 1)) not in (0, 1):
        raise refuse(
            field,
            f"'{file.path}' has {SPLIT} {shown(files)}: the others hold the rest of its tensors; "
            "legal: 1 (`llama-gguf-split --merge` makes one file of them)",
        )
    keys = (key for key in file.fields("") if not key.startswith(ELSEWHERE))
    values = {key: _decimal(file.get(key)) for key in keys}
    ignored = {key: reason for key in values for start, reason in IGNORED if key.startswith(start)}
    plain = NEUTRAL | (BLOOM_NEUTRAL if architecture == "bloom" else {})
    neutral = {f"{architecture}.{key}": legal for key, legal in plain.items()}
    return Reading(values, str(file.path), kind=KIND, neutral=neutral, ignored=ignored)


def _fields(file: GgufFile, reading: Reading) -> dict[str, Any]:
    """Fields of the shape; what they cannot say is noted."""
    architecture = reading.config[KIND]

    def of(key: str, default: Any = None) -> Any:
        return reading.get(f"{architecture}.{key}", default)

    def lacks(key: str, what: str) -> None:
        reading.lacks(f"{architecture}.{key}", f"{architecture}.{what}")

    rotary = ARCHITECTURES[architecture].fields.get("positions", "rope") == "rope"
    norm = "rms_epsilon" if rotary else "epsilon"
    tokens = file.get("tokenizer.ggml.tokens")
    fields = {
        "name": file.get("general.name") or file.path.stem,
        "layers": of("block_count"),
        "hidden": of("embedding_length"),
        "ffn": of("feed_forward_length"),
        "heads": of("attention.head_count"),
        "kv_heads": of("attention.head_count_kv"),
        "head_dim": of("attention.key_length"),
        "vocab": of("vocab_size") or (len(tokens) if isinstance(tokens, list) else 0) or None,
        "max_positions": of("context_length"),
        "norm_epsilon": of(f"attention.layer_norm_{norm}"),
        "biases": "none",
        **ARCHITECTURES[architecture].fields,
        "tied": "output.weight" not in file.tensors,
    }
    head = fields["head_dim"] or _divided(fields["hidden"], fields["heads"])
    if rotary:
        fields |= {
            "rope_theta": of("rope.freq_base", 10000.0),
            "window": of("attention.sliding_window"),
        }
        fields["rope_scaling"], unknown = _scaling(file, of, head)
        if unknown:
            lacks(unknown.split()[0].rstrip(","), unknown)
    if of("expert_count"):
        fields["moe"] = {
            "experts": of("expert_count"),
            "top_k": of("expert_used_count"),
            "ffn": of("expert_feed_forward_length") or fields["ffn"],
            "renormalise": True,
        }
    for key in ("rope.dimension_count", "attention.value_length")[not rotary :]:
        if (width := of(key)) not in (None, head):
            lacks(key, f"{key} {shown(width)} of {shown(head)}")
    if others := _other_tensors(file, architecture, fields):
        reading.lacks("tensors", f"tensors {', '.join(others)[:90]}")
    return fields


def _other_tensors(file: GgufFile, architecture: str, fields: Mapping[str, Any]) -> list[str]:
    """Tensors that no parameter of the model is stored in, without their blocks' numbers."""
    names = ARCHITECTURES[architecture].names
    parts = {**names.modules, **names.block_modules}
    absent = set() if fields.get("qk_norm") else {"attention.q_norm", "attention.k_norm"}
    biased = {"none": (), "qkv": ("attention.q", "attention.k", "attention.v"), "all": parts}
    known = {
        f"{getattr(stored, 'module', stored)}.{leaf}"
        for part, stored in parts.items()
        for leaf in ("weight", "bias")
        if part not in absent and (leaf == "weight" or part in biased[fields["biases"]])
    }
    found = {re.sub(r"^blk\.\d+\.", "", name) for name in file.tensors}
    ignored = re.compile(f"(.*\\.)?({names.ignored})")
    own = {name for name in found - known if not ignored.fullmatch(name)}
    # Stretched frequencies are named by their key; a tensor an expert (2023) where it is read.
    return sorted(name for name in own if not re.search(r"^rope_factors|\.\d+\.weight$", name))


def _scaling(
    file: GgufFile, of: Callable[..., Any], head: Any
) -> tuple[dict[str, Any] | None, str | None]:
    """The scaling of the rotary frequencies, and what no field says of it."""
    scaling, unknown = read_scaling(of)
    divisors = file.tensors.get(DIVISORS)
    if divisors is not None:
        theta = of("rope.freq_base", 10000.0)
        # What is of another type is refused by the field of the shape.
        sound = isinstance(head, int) and isinstance(theta, int | float) and 0 < theta < math.inf
        found = read_llama3(divisors.data.ravel().tolist(), theta, head) if sound else None
        if scaling or found is None:
            unknown = unknown or f"rope.freq_base, divided by frequencies of its own ({DIVISORS})"
        scaling = found
    if any(name.startswith("rope_factors_") for name in file.tensors):
        unknown = "rope.scaling by lengths (rope_factors_long.weight)"
    return (None, unknown) if unknown else (scaling, None)


def _divided(width: Any, heads: Any) -> int:
    """Width of a head; 0 where the metadata do not give one."""
    sound = isinstance(width, int) and isinstance(heads, int) and heads > 0
    return width // heads if sound else 0


def metadata_of(shape: Shape, architecture: str) -> dict[str, str | int | float]:
    """The metadata of a shape in a file of `architecture`; the inverse of `gguf_shape`."""
    rotary, head = shape.positions == "rope", int(shape.head_dim or 0)
    norm = "rms_epsilon" if shape.norm == "rmsnorm" else "epsilon"
    of = {
        "block_count": shape.layers,
        "context_length": shape.max_positions,
        "embedding_length": shape.hidden,
        "feed_forward_length": shape.ffn,
        "attention.head_count": shape.heads,
        "attention.head_count_kv": int(shape.kv_heads or shape.heads),
        f"attention.layer_norm_{norm}": shape.norm_epsilon,
        "vocab_size": shape.vocab,
    }
    if rotary:
        of |= {
            "attention.key_length": head,
            "attention.value_length": head,
            "rope.dimension_count": head,
            "rope.freq_base": shape.rope_theta,
            **write_scaling(shape),
        }
    if (moe := shape.moe) is not None:
        of |= {
            "expert_count": moe.experts,
            "expert_used_count": moe.top_k,
            "expert_feed_forward_length": moe.ffn,
        }
    return {"general.name": shape.name, **{f"{architecture}.{key}": n for key, n in of.items()}}


def _decimal(value: Any) -> Any:
    """A fp32 number as the shortest decimal that is the same in fp32: 1e-05, not 9.9999997e-06."""
    if not isinstance(value, float):
        return value
    decimals = (float(f"{value:.{digits}g}") for digits in range(1, 10))
    return next((found for found in decimals if _fp32(found) == _fp32(value)), value)


def _fp32(value: float) -> bytes:
    return struct.pack("<f", value)
