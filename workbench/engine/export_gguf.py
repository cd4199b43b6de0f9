"""Export of a checkpoint's parameters as one GGUF file, which llama.cpp and its kin load.

`python -m workbench.engine.export_gguf CHECKPOINT --to FILE` prints its progress as lines of JSON,
the answer last. Tensors are read, quantised and written one at a time.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from workbench.checkpoint import read_tensors
from workbench.checkpoint.gguf_tensors import gguf_name, permuted_rows
from workbench.checkpoint.huggingface_names import parameter_shapes
from workbench.checkpoint.resume_point import checkpoint_shape
from workbench.checkpoint.tensor_index import TensorSource, checkpoint_source
from workbench.engine.export_weights import (
    ByteCounter,
    Progress,
    answered,
    as_json,
    check_files,
    shard_of,
)
from workbench.errors import PlanError, Problem, refuse
from workbench.plan.catalog.families.family import unmet
from workbench.plan.catalog.families.llama import LLAMA_STYLE
from workbench.plan.catalog.gguf_config import ARCHITECTURES, metadata_of
from workbench.plan.model.model_shape import Shape
from workbench.safe_io.gguf_files import open_gguf

FILE_TYPES = {"f32": 0, "f16": 1, "bf16": 32, "q8_0": 7}
"""Type of matrices -> general.file_type; vectors are fp32, as llama.cpp has them."""


def export_gguf(
    checkpoint: Path,
    to: Path,
    kind: str = "f16",
    tokenizer: Path | None = None,
    progress: Progress = lambda done, of, what: None,
) -> dict[str, Any]:
    """Write a checkpoint's parameters into a new GGUF file.

    Args:
        checkpoint: A checkpoint.
        to: The file, which appears when all is written.
        kind: Of matrices: f32, f16, bf16 or q8_0. A matrix whose rows q8_0's blocks of 32 do not
            divide is f16.
        tokenizer: A GGUF file whose tokenizer and chat template are written too.
        progress: Called with (bytes done, bytes in all, current step).

    Returns:
        Tensors, parameters, bytes and type written, and the matrices that are f16 in q8_0's place.

    Raises:
        ValueError: The checkpoint is damaged, GGUF's llama and qwen2 cannot express the model, the
            tokenizer is of another vocabulary, or `to` exists or cannot be written.
    """
    source = checkpoint_source(checkpoint)
    shape = checkpoint_shape(checkpoint, dict(source.meta))
    architecture = _architecture(shape)
    if to.exists():
        raise refuse("--to", f"'{to}' is there already; legal: a new file")
    extents = parameter_shapes(shape)
    fields = {} if tokenizer is None else _tokenizer(tokenizer, shape)
    elements = sum(int(np.prod(extent)) for extent in extents.values())
    total = sum(size for size, _ in source.files.values()) + 4 * elements
    count = ByteCounter(total, progress)
    check_files(source, count)
    writing = to.with_name(f".{to.name}.writing-{os.getpid()}")
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        coarser = _write(writing, source, shape, architecture, kind, fields, count)
        writing.rename(to)
    except OSError as error:
        raise refuse(
            "--to",
            f"'{to}' cannot be written: {error.strerror or error}; free space there, or choose "
            "another folder",
        ) from None
    finally:
        writing.unlink(missing_ok=True)
    return {
        "folder": str(to),
        "files": [to.name],
        "tensors": len(extents),
        "parameters": elements,
        "bytes": to.stat().st_size,
        "dtype": kind,
        "f16_instead": coarser,
    }


def _architecture(shape: Shape) -> str:
    """The value of general.architecture that computes what the model does."""
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


def _tokenizer(path: Path, shape: Shape) -> dict[str, Any]:
    """The fields of a file's tokenizer, which is to be of the model's vocabulary."""
    file = open_gguf(path, "--tokenizer")
    tokens = file.get("tokenizer.ggml.tokens")
    if tokens is None or len(tokens) != shape.vocab:
        has = "no tokenizer" if tokens is None else f"{len(tokens):,} tokens"
        raise refuse(
            "--tokenizer", f"'{path}' has {has}; the model's vocabulary is {shape.vocab:,}"
        )
    return file.fields("tokenizer.")


def _write(
    path: Path,
    source: TensorSource,
    shape: Shape,
    architecture: str,
    kind: str,
    fields: dict[str, Any],
    count: ByteCounter,
) -> list[str]:
    from gguf import GGML_QUANT_VERSION, GGMLQuantizationType, GGUFWriter, quantize
    from gguf.quants import quant_shape_to_byte_shape

    extents = parameter_shapes(shape)
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
        for name, extent in extents.items():
            count.what = f"writing {gguf_name(name)}"
            value = permuted_rows(_read(source, name, extent), name, shape, architecture)
            writer.write_tensor_data(quantize(value, GGMLQuantizationType[kinds[name].upper()]))
            count(4 * value.size)
    finally:
        writer.close()
    asked = [name for name, extent in extents.items() if len(extent) > 1]
    return [gguf_name(name) for name in asked if kinds[name] != kind]


def _kind(extent: tuple[int, ...], kind: str) -> str:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    if len(extent) == 1:
        return "f32"
    block, _ = GGML_QUANT_SIZES[GGMLQuantizationType[kind.upper()]]
    return "f16" if extent[-1] % block else kind


def _read(source: TensorSource, name: str, extent: tuple[int, ...]) -> np.ndarray:
    """A parameter, fp32."""
    shard = shard_of(source, name, extent, tuple((0, n) for n in extent), device="cpu")
    read_tensors.copy_boxes(source, [(shard, read_tensors.overlapping_boxes(source, shard))])
    return shard.tensor.float().numpy()


def main() -> int:
    """Export; 2 with one line on stderr where it is refused."""
    parser = argparse.ArgumentParser(prog="python -m workbench.engine.export_gguf")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--type", choices=FILE_TYPES, default="f16")
    parser.add_argument("--tokenizer", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    given = arguments.checkpoint, arguments.to, arguments.type, arguments.tokenizer
    return answered(lambda: export_gguf(*given, progress=as_json))


if __name__ == "__main__":
    sys.exit(main())
