"""Writing of weights as a GGUF file, tensor by tensor, as llama.cpp's converter names them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from workbench.checkpoint.gguf.gguf_tensors import gguf_parts, permuted_rows
from workbench.corpora.tokenizers.gguf_tokenizer import TOKENS, tokenizer_metadata
from workbench.errors import PlanError, Problem, refuse
from workbench.plan.catalog.families.family import unmet
from workbench.plan.catalog.families.stored_parts import StoredPart, stored_extents
from workbench.plan.catalog.gguf_architectures import ARCHITECTURES
from workbench.plan.catalog.gguf_config import metadata_of
from workbench.plan.catalog.gguf_rotary import DIVISORS, divisors_of
from workbench.plan.model.model_shape import Shape
from workbench.safe_io.gguf_files import open_gguf

FILE_TYPES = {"f32": 0, "f16": 1, "bf16": 32, "q8_0": 7}
"""Type of matrices -> general.file_type; vectors are fp32, as llama.cpp has them."""
KEPT_F32 = re.compile(r"position_embd\.weight|blk\.\d+\.ffn_gate_inp\.weight")
"""Matrices that llama.cpp's converter leaves in fp32: positions and routers."""


def gguf_architecture(shape: Shape) -> str:
    """The value of general.architecture that computes what the model does.

    Raises:
        PlanError: None does; names every field that the nearest cannot express.
    """
    written = {
        name: known.expresses
        for name, known in ARCHITECTURES.items()
        if known.expresses is not None
    }
    lacking = {name: unmet(expresses, shape) for name, expresses in written.items()}
    nearest = min(lacking, key=lambda name: len(lacking[name]))
    found = [
        Problem(
            f"model.{name}",
            f"is {value!r}, which GGUF's {nearest} cannot express; "
            f"legal: {' or '.join(map(str, can))}",
        )
        for name, (value, can) in lacking[nearest].items()
    ]
    if found:
        raise PlanError(found)
    return nearest


def has_tokenizer(path: Path) -> bool:
    """Whether a GGUF file holds a tokenizer. Raises PlanError."""
    return open_gguf(path).get(TOKENS) is not None


class MetadataValue(NamedTuple):
    """A value to write, its `gguf.GGUFValueType`, and that of a list's items."""

    value: Any
    kind: Any
    inner: Any

    @classmethod
    def of(cls, value: Any) -> MetadataValue:
        """A value of Python with the types of its own."""
        from gguf import GGUFValueType

        inner = GGUFValueType.get_type(value[0]) if isinstance(value, list) else None
        kind = GGUFValueType.UINT32 if type(value) is int else GGUFValueType.get_type(value)
        return cls(value, kind, inner)


def tokenizer_fields(path: Path, shape: Shape) -> dict[str, MetadataValue]:
    """The fields of a file's tokenizer.

    Raises:
        PlanError: It has none, or one of another vocabulary than the model's.
    """
    file = open_gguf(path, "--tokenizer")
    tokens = file.get(TOKENS) and tokenizer_metadata(file, "--tokenizer")[TOKENS]
    if tokens is None or len(tokens) != shape.vocab:
        has = "no tokenizer" if tokens is None else f"{len(tokens):,} tokens"
        raise refuse(
            "--tokenizer", f"'{path}' has {has}; the model's vocabulary is {shape.vocab:,}"
        )
    return {
        key: MetadataValue(field.contents(), field.types[0], field.types[-1])
        for key, field in file.fields("tokenizer.").items()
    }


def write_gguf(
    path: Path,
    shape: Shape,
    kind: str,
    fields: Mapping[str, MetadataValue],
    read: Callable[[str], np.ndarray],
) -> list[str]:
    """Write a GGUF file.

    Args:
        path: The new file.
        shape: The model.
        kind: Of matrices; one of `FILE_TYPES`.
        fields: Of a tokenizer, as `tokenizer_fields` has them.
        read: Parameter -> its value, fp32; called once for each part.

    Returns:
        The matrices that are f16 in place of `kind`, whose blocks do not divide their rows.
    """
    from gguf import GGML_QUANT_VERSION, GGMLQuantizationType, GGUFWriter, quantize
    from gguf.quants import quant_shape_to_byte_shape

    architecture = gguf_architecture(shape)
    parts = gguf_parts(architecture, shape)
    extents = stored_extents(parts)
    divisors = divisors_of(shape)
    kinds = {key: _kind(key, extent, kind) for key, extent in extents.items()}
    if divisors is not None:
        extents[DIVISORS], kinds[DIVISORS] = (len(divisors),), "f32"
    writer = GGUFWriter(path, architecture)
    add: dict[type, Callable[[str, Any], None]]
    add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}
    for key, said in metadata_of(shape, architecture).items():
        add[type(said)](key, said)
    writer.add_file_type(FILE_TYPES[kind])
    writer.add_quantization_version(GGML_QUANT_VERSION)
    for key, field in fields.items():
        writer.add_key_value(key, *field)
    for key, extent in extents.items():
        made = GGMLQuantizationType[kinds[key].upper()]
        stored = {"f32": np.float32, "f16": np.float16}.get(kinds[key], np.uint8)
        size = extent if stored != np.uint8 else quant_shape_to_byte_shape(extent, made)
        nbytes = int(np.prod(size)) * np.dtype(stored).itemsize
        writer.add_tensor_info(key, size, np.dtype(stored), nbytes, made)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for key, extent in extents.items():
            if key == DIVISORS:
                value = np.array(divisors, np.float32)
            else:
                value = _stored(key, extent, parts, read)
                value = permuted_rows(value, key, shape, architecture)
            writer.write_tensor_data(quantize(value, GGMLQuantizationType[kinds[key].upper()]))
    finally:
        writer.close()
    matrices = [key for key, extent in extents.items() if len(extent) > 1]
    return [key for key in matrices if kinds[key] != kind and not KEPT_F32.fullmatch(key)]


def _stored(
    key: str,
    extent: tuple[int, ...],
    parts: Mapping[str, list[StoredPart]],
    read: Callable[[str], np.ndarray],
) -> np.ndarray:
    """A stored tensor, of the parameters that make it up, fp32."""
    made = np.empty(extent, np.float32)
    for name, own in parts.items():
        for part in own:
            if part.key == key:
                ours, theirs = (tuple(slice(*s) for s in box) for box in (part.ours, part.theirs))
                made[theirs] = read(name)[ours]
    return made


def _kind(key: str, extent: tuple[int, ...], kind: str) -> str:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    if len(extent) == 1 or KEPT_F32.fullmatch(key):
        return "f32"
    block, _ = GGML_QUANT_SIZES[GGMLQuantizationType[kind.upper()]]
    return "f16" if extent[-1] % block else kind
