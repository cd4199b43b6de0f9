"""Writing of weights as a GGUF file, tensor by tensor, as llama.cpp's converter names them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from workbench.checkpoint.gguf.gguf_tensors import gguf_name, permuted_rows
from workbench.checkpoint.huggingface_names import parameter_shapes
from workbench.errors import PlanError, Problem, refuse
from workbench.plan.catalog.families.family import unmet
from workbench.plan.catalog.families.llama import LLAMA_STYLE
from workbench.plan.catalog.gguf_config import ARCHITECTURES, metadata_of
from workbench.plan.model.model_shape import Shape
from workbench.safe_io.gguf_files import open_gguf

FILE_TYPES = {"f32": 0, "f16": 1, "bf16": 32, "q8_0": 7}
"""Type of matrices -> general.file_type; vectors are fp32, as llama.cpp has them."""


def gguf_architecture(shape: Shape) -> str:
    """The value of general.architecture that computes what the model does.

    Raises:
        PlanError: None does; names every field that they cannot express.
    """
    legal = {**LLAMA_STYLE, "biases": tuple(ARCHITECTURES.values()), "mlp": ("swiglu",)}
    legal |= {"rope_scaling": (None,)}
    found = [
        Problem(
            f"model.{name}",
            f"is {value!r}, which GGUF's {' and '.join(ARCHITECTURES)} cannot express; "
            f"legal: {' or '.join(map(str, can))}",
        )
        for name, (value, can) in unmet(legal, shape).items()
    ]
    if found:
        raise PlanError(found)
    return next(name for name, biases in ARCHITECTURES.items() if biases == shape.biases)


def tokenizer_fields(path: Path, shape: Shape) -> dict[str, Any]:
    """The fields of a file's tokenizer.

    Raises:
        PlanError: It has none, or one of another vocabulary than the model's.
    """
    file = open_gguf(path, "--tokenizer")
    tokens = file.get("tokenizer.ggml.tokens")
    if tokens is None or len(tokens) != shape.vocab:
        has = "no tokenizer" if tokens is None else f"{len(tokens):,} tokens"
        raise refuse(
            "--tokenizer", f"'{path}' has {has}; the model's vocabulary is {shape.vocab:,}"
        )
    return file.fields("tokenizer.")


def write_gguf(
    path: Path, shape: Shape, kind: str, fields: dict[str, Any], read: Callable[[str], np.ndarray]
) -> list[str]:
    """Write a GGUF file.

    Args:
        path: The new file.
        shape: The model.
        kind: Of matrices; one of `FILE_TYPES`.
        fields: Of a tokenizer, as `tokenizer_fields` has them.
        read: Parameter -> its value, fp32; called once for each, in order.

    Returns:
        The matrices that are f16 in place of `kind`, whose blocks do not divide their rows.
    """
    from gguf import GGML_QUANT_VERSION, GGMLQuantizationType, GGUFWriter, quantize
    from gguf.quants import quant_shape_to_byte_shape

    architecture, extents = gguf_architecture(shape), parameter_shapes(shape)
    kinds = {name: _kind(extent, kind) for name, extent in extents.items()}
    writer = GGUFWriter(path, architecture)
    add: dict[type, Callable[[str, Any], None]]
    add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}
    for key, said in metadata_of(shape, architecture).items():
        add[type(said)](key, said)
    writer.add_file_type(FILE_TYPES[kind])
    writer.add_quantization_version(GGML_QUANT_VERSION)
    for key, field in fields.items():
        writer.add_key_value(key, field.contents(), field.types[0], field.types[-1])
    for name, extent in extents.items():
        made = GGMLQuantizationType[kinds[name].upper()]
        stored = {"f32": np.float32, "f16": np.float16}.get(kinds[name], np.uint8)
        size = extent if stored != np.uint8 else quant_shape_to_byte_shape(extent, made)
        nbytes = int(np.prod(size)) * np.dtype(stored).itemsize
        writer.add_tensor_info(gguf_name(name), size, np.dtype(stored), nbytes, made)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for name in extents:
            value = permuted_rows(read(name), name, shape, architecture)
            writer.write_tensor_data(quantize(value, GGMLQuantizationType[kinds[name].upper()]))
    finally:
        writer.close()
    matrices = [name for name, extent in extents.items() if len(extent) > 1]
    return [gguf_name(name) for name in matrices if kinds[name] != kind]


def _kind(extent: tuple[int, ...], kind: str) -> str:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    if len(extent) == 1:
        return "f32"
    block, _ = GGML_QUANT_SIZES[GGMLQuantizationType[kind.upper()]]
    return "f16" if extent[-1] % block else kind
