"""Export of a checkpoint's parameters as one GGUF file, which llama.cpp and its kin load.

`python -m workbench.engine.export.export_gguf CHECKPOINT --to FILE` prints its progress as JSON
lines, the answer last. Tensors are read, quantised and written one at a time.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from workbench.checkpoint import read_tensors
from workbench.checkpoint.gguf.gguf_writer import (
    FILE_TYPES,
    gguf_architecture,
    tokenizer_fields,
    write_gguf,
)
from workbench.checkpoint.huggingface_names import parameter_shapes
from workbench.checkpoint.resume_point import checkpoint_shape
from workbench.checkpoint.tensor_index import TensorSource, checkpoint_source
from workbench.engine.export.export_weights import (
    ByteCounter,
    Progress,
    answered,
    as_json,
    check_files,
    shard_of,
    unwritable,
)
from workbench.errors import refuse


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
        ValueError: The checkpoint is damaged, no architecture of GGUF expresses the model, the
            tokenizer is of another vocabulary, or `to` exists or cannot be written.
    """
    source = checkpoint_source(checkpoint)
    shape = checkpoint_shape(checkpoint, dict(source.meta))
    gguf_architecture(shape)
    if to.exists():
        raise refuse("--to", f"'{to}' is there already; legal: a new file")
    extents = parameter_shapes(shape)
    fields = {} if tokenizer is None else tokenizer_fields(tokenizer, shape)
    elements = sum(int(np.prod(extent)) for extent in extents.values())
    total = sum(size for size, _ in source.files.values()) + 4 * elements
    count = ByteCounter(total, progress)
    check_files(source, count)

    def read(name: str) -> np.ndarray:
        count.what = f"writing {name}"
        value = _read(source, name, extents[name])
        count(4 * value.size)
        return value

    writing = to.with_name(f".{to.name}.writing-{os.getpid()}")
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        coarser = write_gguf(writing, shape, kind, fields, read)
        writing.rename(to)
    except OSError as error:
        raise unwritable(to, error) from None
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


def _read(source: TensorSource, name: str, extent: tuple[int, ...]) -> np.ndarray:
    """A parameter, fp32."""
    shard = shard_of(source, name, extent, tuple((0, n) for n in extent), device="cpu")
    read_tensors.copy_boxes(source, [(shard, read_tensors.overlapping_boxes(source, shard))])
    return shard.tensor.float().numpy()


def main() -> int:
    """Export; 2 with one line on stderr where it is refused."""
    parser = argparse.ArgumentParser(prog="python -m workbench.engine.export.export_gguf")
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
