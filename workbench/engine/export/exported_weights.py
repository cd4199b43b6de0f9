"""What weights an export writes: those of a checkpoint, or of a base model with adapters merged."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from workbench.adapters.peft_folder import read_peft_folder
from workbench.adapters.trained_adapters import TrainedAdapters, base_of_run, trained_adapters
from workbench.adapters.weight_updates import FourBitRounding, WeightUpdates, read_updates
from workbench.checkpoint import read_tensors, tensor_integrity
from workbench.checkpoint.checkpoint_format import Shard
from workbench.checkpoint.gguf.gguf_tensors import gguf_source
from workbench.checkpoint.huggingface.huggingface_names import (
    FURTHER_LAYERS,
    config_json,
    family_of_weights,
    huggingface_source,
    writing_family,
)
from workbench.checkpoint.manifest import MANIFEST
from workbench.checkpoint.resume_point import (
    ADAPTER_CONFIG,
    CONFIG,
    checkpoint_shape,
    holds_adapters,
    is_gguf,
    is_huggingface_folder,
    naming_field,
    refuse_other_model,
)
from workbench.checkpoint.tensor_index import Box, TensorSource, checkpoint_source
from workbench.engine.export.exported_tokenizer import TOKENIZER_FILES
from workbench.engine.precision import DTYPES
from workbench.errors import refuse
from workbench.plan.base_weights import base_sha256
from workbench.plan.catalog.families.family import Family
from workbench.plan.model.block_linears import model_linears
from workbench.plan.model.model_shape import Shape
from workbench.plan.resolution import model_shape
from workbench.plan.schema import STORED
from workbench.runtime_facts.four_bit_sizes import FourBitFormat

BASE = "--base"
RENEWED = ("quantization_config", "torch_dtype", "dtype", *FURTHER_LAYERS)
"""Keys of a base's config.json that merged weights need not agree with."""


@dataclass(frozen=True)
class ExportedWeights:
    """Weights to write.

    Attributes:
        source: Of the base, or of the checkpoint.
        shape: The model.
        family: As which it is written.
        updates: What is merged into them; None: nothing.
        base: Where the base is; None: they are a checkpoint's own.
        base_sha256: What the base's hash is to be.
    """

    source: TensorSource
    shape: Shape
    family: Family
    updates: WeightUpdates | None = None
    base: Path | None = None
    base_sha256: str | None = None

    def check(self, hashed: Callable[[int], None]) -> None:
        """Verify the checksums of all files.

        Args:
            hashed: Called with the bytes of each part.

        Raises:
            ValueError: A file is damaged, or the base is not the one that was fine-tuned.
        """
        for file in self.source.files:
            tensor_integrity.verify_file(self.source, file, hashed)
        if self.base is None or self.base_sha256 is None:
            return
        before = 0

        def read(done: int, of: int) -> None:
            nonlocal before
            hashed(done - before)
            before = done

        if (found := base_sha256(self.base, BASE, read)) != self.base_sha256:
            raise refuse(
                BASE,
                f"'{self.base}' has sha256 {found}, the adapters are of {self.base_sha256}; legal: "
                "the weights that were fine-tuned",
            )

    @property
    def checked_bytes(self) -> int:
        """Bytes that `check` reads."""
        sizes = [(size, sha256) for size, sha256 in self.source.files.values()]
        hashed = [size for size, sha256 in sizes if sha256 or self.base_sha256]
        return sum(hashed)

    def read(self, shard: Shard, boxes: Sequence[Box]) -> Tensor:
        """A box of a parameter, with what is merged into it: in fp32, rounded once.

        Args:
            shard: The box, in the dtype that it is wanted in.
            boxes: Where the source has it.
        """
        dtype, updated = shard.tensor.dtype, self.updates and self.updates.changes(shard.name)
        wide = torch.promote_types(dtype, torch.float32) if updated else dtype
        value = torch.empty(shard.tensor.shape, dtype=wide)
        target = replace(shard, tensor=value)
        read_tensors.copy_boxes(self.source, [(target, boxes)])
        if self.updates is not None:
            self.updates.apply(shard.name, shard.slices, value)
        return value.to(dtype)

    def config(self, dtype: torch.dtype) -> dict[str, Any]:
        """Content of config.json: the base's, where it has one."""
        made = config_json(self.shape, dtype, self.family)
        if self.base is None or not is_huggingface_folder(self.base):
            return made
        kept = json.loads((self.base / CONFIG).read_text(encoding="utf-8"))
        return {key: it for key, it in kept.items() if key not in RENEWED} | {
            "torch_dtype": made["torch_dtype"]
        }

    def copy_tokenizer(self, folder: Path) -> None:
        """Copy the base's tokenizer and templates beside the weights."""
        for name in TOKENIZER_FILES if self.base is not None else ():
            if self.base and (self.base / name).is_file():
                shutil.copyfile(self.base / name, folder / name)


def weights_to_export(source: Path, base: Path | None = None) -> ExportedWeights:
    """What a checkpoint, or a folder of adapters in PEFT's format, is exported as.

    Args:
        source: A checkpoint, or a PEFT folder.
        base: The weights that adapters are merged into; None: those that the run says.

    Raises:
        ValueError: Something is damaged, there is no base, or it is of another model.
    """
    if (source / ADAPTER_CONFIG).is_file():
        return _of_peft_folder(source, base)
    found = checkpoint_source(source)
    if not holds_adapters(found.meta):
        if base is not None:
            raise refuse(BASE, f"is for adapters; '{source}' holds all weights")
        shape = checkpoint_shape(source, dict(found.meta))
        return ExportedWeights(found, shape, writing_family(shape))
    trained = trained_adapters(found)
    path = base_path(source, base)
    weights = base_source(path, trained.shape)
    for file in found.files:
        tensor_integrity.verify_file(found, file)
    updates = replace(read_updates(found, trained.scales), four_bit=_four_bit_rounding(trained))
    family = family_of_weights(path, trained.shape)
    return ExportedWeights(weights, trained.shape, family, updates, path, trained.tune.base_sha256)


def _four_bit_rounding(trained: TrainedAdapters) -> FourBitRounding | None:
    """How the weights were stored that a checkpoint's adapters were trained beside."""
    quantize = trained.tune.quantize
    if quantize is None:
        return None
    form = FourBitFormat(quantize.format, quantize.group, quantize.double)
    names = frozenset(f"{path}.weight" for path in model_linears(trained.shape))
    precision = trained.source.meta["precision"]
    return FourBitRounding(names, form, DTYPES[STORED.get(precision, precision)])


def _of_peft_folder(folder: Path, base: Path | None) -> ExportedWeights:
    if base is None:
        raise refuse(BASE, f"is needed to merge the adapters of '{folder}'")
    _refuse_no_weights(base)
    shape = shape_of_base(base)
    weights, family = base_source(base, shape), family_of_weights(base, shape)
    adapters = read_peft_folder(folder, family, shape, "SOURCE")
    updates = read_updates(adapters.source, adapters.scales, adapters.replaced)
    return ExportedWeights(weights, shape, family, updates, base)


def base_path(checkpoint: Path, base: Path | None) -> Path:
    """Where the base of a checkpoint's adapters is.

    Raises:
        PlanError: It is not known, or is gone.
    """
    said = base or base_of_run(checkpoint)
    if said is None:
        why = "does not say where its base is; where the seed drew it, no file holds it"
        raise refuse(BASE, f"is needed: {checkpoint} {why}")
    if not Path(said).exists():
        raise refuse(BASE, f"is needed: '{said}', of which {checkpoint} has adapters, is gone")
    _refuse_no_weights(Path(said))
    return Path(said)


def _refuse_no_weights(base: Path) -> None:
    if not (is_gguf(base) or is_huggingface_folder(base) or (base / MANIFEST).is_file()):
        legal = "a folder of Hugging Face weights, a GGUF file, or a checkpoint"
        raise refuse(BASE, f"'{base}' holds no weights; legal: {legal}")


def shape_of_base(base: Path) -> Shape:
    """The model of base weights. Raises ValueError."""
    if (base / MANIFEST).is_file():
        return checkpoint_shape(base, dict(checkpoint_source(base).meta))
    return model_shape(str(base))


def base_source(base: Path, shape: Shape) -> TensorSource:
    """Index of base weights of a model of this shape.

    Raises:
        ValueError: They are damaged, incomplete or of another model.
    """
    with naming_field(BASE):
        if is_gguf(base):
            return gguf_source(base, shape)
        if is_huggingface_folder(base):
            return huggingface_source(base, shape)
    found = checkpoint_source(base)
    if holds_adapters(found.meta):
        raise refuse(BASE, f"'{base}' holds adapters alone; legal: weights of a complete model")
    refuse_other_model(BASE, base, checkpoint_shape(base, dict(found.meta)), shape)
    return found
