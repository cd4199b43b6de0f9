"""The shape of the model in a GGUF file, from its metadata.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; defaults are those of llama.cpp.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from workbench.errors import refuse
from workbench.fields.validation_messages import plan_error
from workbench.plan.model.model_shape import Shape
from workbench.safe_io.gguf_files import GgufFile, open_gguf
from workbench.untrusted_text import shown

ARCHITECTURES = {"llama": "none", "qwen2": "qkv"}
"""Value of general.architecture -> which linear layers have biases. Mistral's is llama too."""


def read_gguf_config(path: str | Path, field: str = "model") -> Shape:
    """The shape that a GGUF file describes.

    What it computes beyond the fields of a shape (stretched rotary frequencies, say) becomes the
    shape's `unmodelled`.

    Raises:
        PlanError: Names `field`, and what is wrong with the file.
    """
    return gguf_shape(open_gguf(path, field), field)


def gguf_shape(file: GgufFile, field: str = "model") -> Shape:
    """The shape of an open GGUF file; raises as `read_gguf_config` does."""
    architecture = file.get("general.architecture")
    if architecture not in ARCHITECTURES:
        legal = ", ".join(ARCHITECTURES)
        raise refuse(
            field, f"'{file.path}' has general.architecture {shown(architecture)}; legal: {legal}"
        )

    def of(key: str, default: Any = None) -> Any:
        return _decimal(file.get(f"{architecture}.{key}", default))

    fields = {
        "name": file.get("general.name") or file.path.stem,
        "layers": of("block_count"),
        "hidden": of("embedding_length"),
        "ffn": of("feed_forward_length"),
        "heads": of("attention.head_count"),
        "kv_heads": of("attention.head_count_kv"),
        "head_dim": of("attention.key_length"),
        "vocab": of("vocab_size") or len(file.get("tokenizer.ggml.tokens", ())) or None,
        "max_positions": of("context_length"),
        "norm_epsilon": of("attention.layer_norm_rms_epsilon"),
        "rope_theta": of("rope.freq_base", 10000.0),
        "window": of("attention.sliding_window"),
        "biases": ARCHITECTURES[architecture],
        "tied": "output.weight" not in file.tensors,
        "unmodelled": "; ".join(_unmodelled(file, architecture)) or None,
    }
    try:
        return Shape.model_validate(fields)
    except ValidationError as error:
        raise plan_error(error, fields, Shape) from None


def metadata_of(shape: Shape, architecture: str) -> dict[str, str | int | float]:
    """The metadata of a shape in a file of `architecture`; the inverse of `gguf_shape`."""
    of = {
        "block_count": shape.layers,
        "context_length": shape.max_positions,
        "embedding_length": shape.hidden,
        "feed_forward_length": shape.ffn,
        "attention.head_count": shape.heads,
        "attention.head_count_kv": int(shape.kv_heads or shape.heads),
        "attention.key_length": int(shape.head_dim or 0),
        "attention.value_length": int(shape.head_dim or 0),
        "attention.layer_norm_rms_epsilon": shape.norm_epsilon,
        "rope.dimension_count": int(shape.head_dim or 0),
        "rope.freq_base": shape.rope_theta,
        "vocab_size": shape.vocab,
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


def _unmodelled(file: GgufFile, architecture: str) -> list[str]:
    """What the file's model computes that no field of a shape says."""
    found = []
    scaling = file.get(f"{architecture}.rope.scaling.type")
    if scaling not in (None, "none"):
        found.append(f"{architecture}.rope.scaling.type {shown(scaling)}")
    if "rope_freqs.weight" in file.tensors:
        found.append("rotary frequencies of its own (rope_freqs.weight)")
    if experts := file.get(f"{architecture}.expert_count"):
        found.append(f"{architecture}.expert_count {shown(experts)}")
    head = file.get(f"{architecture}.attention.key_length")
    turned = file.get(f"{architecture}.rope.dimension_count")
    if None not in (head, turned) and head != turned:
        found.append(f"{architecture}.rope.dimension_count {shown(turned)} of {shown(head)}")
    return found
