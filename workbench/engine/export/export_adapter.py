"""Export of a checkpoint's adapters as a folder in PEFT's format.

`python -m workbench.engine.export.export_adapter CHECKPOINT --to FOLDER` prints its progress as
JSON lines, the answer last.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from torch import Tensor

from workbench.adapters.peft_writer import write_peft_folder
from workbench.adapters.trained_adapters import base_of_run, trained_adapters
from workbench.checkpoint import read_tensors
from workbench.checkpoint.huggingface.huggingface_names import family_of_weights
from workbench.checkpoint.resume_point import naming_field
from workbench.checkpoint.safetensors_writer import TORCH_DTYPES
from workbench.checkpoint.tensor_index import checkpoint_source
from workbench.engine.export.export_command import answered, as_json, export_parser
from workbench.engine.export.export_weights import ByteCounter, Progress, check_files, shard_of
from workbench.engine.export.exported_weights import BASE, base_path
from workbench.engine.export.new_folder import check_new_folder, new_folder

DEFAULT = "default"
"""Name of adapters that lie in the folder itself; others have a folder of their name in it."""


def export_adapter(
    checkpoint: Path,
    to: Path,
    base: Path | None = None,
    progress: Progress = lambda done, of, what: None,
) -> dict[str, Any]:
    """Write a checkpoint's adapters, unconverted, as PEFT does.

    Args:
        checkpoint: A checkpoint of adapters.
        to: The folder. Adapters with a name of their own get a folder of that name in it.
        base: The weights that were fine-tuned; None: those that the run says.
        progress: Called with (bytes done, bytes in all, current step).

    Returns:
        Files, tensors, parameters, bytes and dtype written, and the adapters' name.

    Raises:
        ValueError: The checkpoint is damaged, PEFT cannot express its adapters, or the folder
            exists or cannot be written.
    """
    source = checkpoint_source(checkpoint)
    trained = trained_adapters(source)
    shape, name = trained.shape, trained.tune.adapter
    folder = to if name == DEFAULT else to / name
    check_new_folder(folder)
    drawn = base is None and trained.tune.base_sha256 is None and base_of_run(checkpoint) is None
    path = None if drawn else base_path(checkpoint, base)
    with naming_field(BASE):
        family = family_of_weights(path, shape)
    size = sum(size for size, _ in source.files.values())
    count = ByteCounter(size, progress)
    check_files(source, count)
    dtype = TORCH_DTYPES[source.tensors[f"{trained.names[0]}.lora_a", "parameter"].boxes[0].dtype]

    def read(parameter: str) -> Tensor:
        extent = source.tensors[parameter, "parameter"].shape
        shard = shard_of(source, parameter, extent, tuple((0, n) for n in extent), device="cpu")
        boxes = read_tensors.overlapping_boxes(source, shard)
        read_tensors.copy_boxes(source, [(shard, boxes)])
        return shard.tensor

    with new_folder(folder) as writing:
        answer = write_peft_folder(
            writing,
            family,
            shape,
            trained.lora,
            trained.names,
            dtype,
            read,
            None if path is None else str(path),
        )
    return {"folder": str(folder), "adapter": name, **answer}


def main() -> int:
    """Export; 2 with one line on stderr where it is refused."""
    given = export_parser("export_adapter").parse_args()
    return answered(lambda: export_adapter(given.checkpoint, given.to, given.base, as_json))


if __name__ == "__main__":
    sys.exit(main())
