"""Export of a checkpoint's parameters as one GGUF file, which llama.cpp and its kin load.

`python -m workbench.engine.export.export_gguf CHECKPOINT --to FILE` prints its progress as JSON
lines, the answer last. Tensors are read, quantised and written one at a time.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from workbench.checkpoint import read_tensors
from workbench.checkpoint.checkpoint_format import Shard
from workbench.checkpoint.gguf.gguf_writer import (
    FILE_TYPES,
    MetadataValue,
    gguf_architecture,
    has_tokenizer,
    write_gguf,
)
from workbench.checkpoint.huggingface.huggingface_names import parameter_shapes
from workbench.checkpoint.resume_point import is_gguf
from workbench.engine.export.export_command import answered, as_json, export_parser
from workbench.engine.export.export_weights import ByteCounter, Progress, shard_of
from workbench.engine.export.exported_tokenizer import (
    gguf_tokenizer_fields,
    given_tokenizer,
    run_tokenizer,
)
from workbench.engine.export.exported_weights import ExportedWeights, weights_to_export
from workbench.engine.export.new_folder import unwritable
from workbench.errors import PlanError, refuse


def export_gguf(
    checkpoint: Path,
    to: Path,
    kind: str = "f16",
    tokenizer: Path | None = None,
    progress: Progress = lambda done, of, what: None,
    base: Path | None = None,
) -> dict[str, Any]:
    """Write a checkpoint's parameters into a new GGUF file; adapters merged into their base, W +
    s B A in fp32.

    Args:
        checkpoint: A checkpoint, or a folder of adapters in PEFT's format.
        to: The file, which appears when all is written.
        kind: Of matrices: f32, f16, bf16 or q8_0. A matrix whose rows q8_0's blocks of 32 do not
            divide is f16.
        tokenizer: A GGUF file, or a tokenizer.json or its folder, whose tokenizer and chat template
            are written too; None: those of the base, if it is a GGUF file, or the run's own.
        progress: Called with (bytes done, bytes in all, current step).
        base: The weights that adapters are merged into; None: those that the run says.

    Returns:
        Tensors, parameters, bytes and type written, and the matrices that are f16 in q8_0's place.

    Raises:
        ValueError: The checkpoint is damaged, no architecture of GGUF expresses the model, the
            tokenizer is of another vocabulary, or `to` exists or cannot be written.
    """
    weights = weights_to_export(checkpoint, base)
    shape = weights.shape
    gguf_architecture(shape)
    if to.exists():
        raise refuse("--to", f"'{to}' is there already; legal: a new file")
    extents = parameter_shapes(shape)
    base = weights.base
    if tokenizer is None and base is not None and is_gguf(base) and has_tokenizer(base):
        tokenizer = base
    fields: dict[str, MetadataValue] = {}
    if tokenizer is not None:
        fields = gguf_tokenizer_fields(given_tokenizer(tokenizer), shape)
    elif base is None and (found := run_tokenizer(checkpoint, shape.vocab)):
        with suppress(PlanError):  # of a kind that GGUF has no name for, which nobody asked for
            fields = gguf_tokenizer_fields(found, shape)
    elements = sum(int(np.prod(extent)) for extent in extents.values())
    count = ByteCounter(weights.checked_bytes + 4 * elements, progress)
    count.what = "checking weights"
    weights.check(count)

    def read(name: str) -> np.ndarray:
        count.what = f"writing {name}"
        value = _read(weights, name, extents[name])
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


def _read(weights: ExportedWeights, name: str, extent: tuple[int, ...]) -> np.ndarray:
    """A parameter, fp32."""
    slices = tuple((0, n) for n in extent)
    boxes = read_tensors.overlapping_boxes(
        weights.source, shard_of(weights.source, name, extent, slices)
    )
    target = Shard(name, "parameter", torch.empty(extent, dtype=torch.float32), extent, slices)
    value: np.ndarray = weights.read(target, boxes).numpy()
    return value


def main() -> int:
    """Export; 2 with one line on stderr where it is refused."""
    parser = export_parser("export_gguf")
    parser.add_argument("--type", choices=FILE_TYPES, default="f16")
    parser.add_argument("--tokenizer", type=Path)
    given = parser.parse_args()
    files = given.checkpoint, given.to, given.type, given.tokenizer
    return answered(lambda: export_gguf(*files, as_json, given.base))


if __name__ == "__main__":
    sys.exit(main())
