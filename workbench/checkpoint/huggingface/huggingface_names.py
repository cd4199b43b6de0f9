"""Weights under the names that a family has in transformers.

A folder holds config.json and model.safetensors, or shards of it that model.safetensors.index.json
lists.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from workbench.checkpoint.huggingface.float8_blocks import FLOAT8, SCALES, Float8Blocks, scales_of
from workbench.checkpoint.huggingface.huggingface_folder import check_config, refuse_inexpressible
from workbench.checkpoint.resume_point import CONFIG, is_huggingface_folder
from workbench.checkpoint.safetensors_reader import READ_DTYPES, SafetensorsFile, read_header
from workbench.checkpoint.safetensors_writer import TORCH_DTYPES
from workbench.checkpoint.tensor_index import Box, StoredTensor, TensorSource
from workbench.models import Transformer
from workbench.plan.catalog.families.family import Family
from workbench.plan.catalog.families.stored_parts import StoredPart, TensorNames, stored_extents
from workbench.plan.catalog.families.table import family_of
from workbench.plan.catalog.float8_weights import float8_blocks
from workbench.plan.catalog.huggingface_files import weight_files
from workbench.plan.model.model_shape import Shape

FURTHER_LAYERS = ("num_nextn_predict_layers", "num_mtp_layers")
"""Keys of the number of layers that predict further tokens, of which a model here has none."""
EMBEDDING = "embedding.tokens.weight"
COMPARED = 2**20
"""Elements of two tensors that are compared at once."""
WEIGHT_KINDS = ("parameter", "master")
"""Kinds of training state that weights alone can fill."""


def parameter_shapes(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Global name -> shape of all parameters, tied ones once."""
    with torch.device("meta"):
        return {name: tuple(p.shape) for name, p in Transformer(shape).named_parameters()}


def writing_family(shape: Shape) -> Family:
    """The family whose names and config.json express a model.

    Raises:
        PlanError: None does; names every field that the nearest cannot express.
    """
    family = family_of(shape)
    refuse_inexpressible(shape, family)
    return family


def family_of_weights(path: str | Path | None, shape: Shape) -> Family:
    """The family whose names weights have: that of a Hugging Face folder, else the one that
    expresses the model.

    Args:
        path: The weights; None: there are no files of them.
        shape: Their model.

    Raises:
        PlanError: The folder is of another model, or no family expresses it.
    """
    if path is None or not is_huggingface_folder(Path(path)):
        return writing_family(shape)
    return check_config(Path(path), shape)


def stored_parts(family: Family, shape: Shape) -> dict[str, list[StoredPart]]:
    """Each parameter of a model -> its parts in the family's files."""
    assert family.names is not None, "only families that have names store tensors"
    return {
        name: family.names.parts(name, extent, shape)
        for name, extent in parameter_shapes(shape).items()
    }


def config_json(shape: Shape, dtype: torch.dtype, family: Family | None = None) -> dict[str, Any]:
    """Content of config.json.

    Args:
        shape: The model.
        dtype: Of its weights.
        family: As which it is written; None: the one that expresses it.
    """
    family = family or writing_family(shape)
    assert family.write is not None, "what can be expressed has a configuration"
    return {
        "architectures": [family.language_model],
        "model_type": family.model_type,
        **family.write(shape),
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


def huggingface_source(folder: Path, shape: Shape) -> TensorSource:
    """Index of the weights in a Hugging Face folder.

    Args:
        folder: The folder.
        shape: The plan's model.

    Returns:
        Each weight, as the source of the parameter and of its master weight.

    Raises:
        ValueError: Weights are incomplete or of another model; names the file, field or tensor.
    """
    family = check_config(folder, shape)
    sizes: dict[str, tuple[int, str | None]] = {}
    found: dict[str, Box] = {}
    for file in weight_files(folder):
        sizes[file] = ((folder / file).stat().st_size, None)
        for key, entry in read_header(folder / file, "get the file again").items():
            box = Box(file, key, tuple((0, n) for n in entry.shape), entry.dtype)
            if key in found and not _equal(folder, found[key], box):
                other = folder / found[key].file
                raise ValueError(f"{folder / file} has another {key} than {other}; get one model")
            found[key] = box
    assert family.names is not None
    found = _with_prefix(found, family.names)
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    blocks = float8_blocks(config)
    scales = scales_of(folder, found, blocks)
    parts = stored_parts(family, shape)
    head = _head_key(family.names, shape)
    for key, needed in stored_extents(parts).items():
        if key == head and key not in found:
            raise ValueError(
                f"{folder} has no {key}, and {CONFIG} does not tie the head to the embedding; get "
                "the complete model, or set tie_word_embeddings to true there"
            )
        _check(folder, key, found.get(key), needed)
    tensors: dict[tuple[str, str], StoredTensor] = {}
    for name, extent in parameter_shapes(shape).items():
        boxes = [_box(found[part.key], part) for part in parts[name]]
        tensors |= {(name, kind): StoredTensor(extent, boxes) for kind in WEIGHT_KINDS}
    used = {part.key for own in parts.values() for part in own}
    if shape.tied and head in found:
        _refuse_other_head(folder, found[parts[EMBEDDING][0].key], found[head])
        used.add(head)
    used |= {key + SCALES for key in used if key in found and found[key].dtype == FLOAT8}
    rest = {key: box for key, box in found.items() if key not in used}
    further = _further_layers(rest, family.names, shape, config)
    _refuse_rest(folder, [box.key for key, box in rest.items() if key not in further], family.names)
    opened = SafetensorsFile if blocks is None else Float8Blocks(folder, blocks, scales)
    said = _left_out(folder, further)
    return TensorSource(folder, tensors, sizes, {}, exact=False, opened=opened, left_out=said)


def _head_key(names: TensorNames, shape: Shape) -> str:
    (part,) = names.parts("head.weight", (shape.vocab, shape.hidden), shape)
    return part.key


def _refuse_other_head(folder: Path, embedding: Box, head: Box) -> None:
    """Refuse a head that is no copy of the embedding to which the configuration ties it."""
    if not _equal(folder, embedding, head):
        raise ValueError(
            f"{folder / head.file}: {head.key} differs from {embedding.key}, to which {CONFIG} "
            f"ties it; set tie_word_embeddings to false there, or get files without {head.key}"
        )


def _equal(folder: Path, one: Box, other: Box) -> bool:
    """Compare two stored tensors, read part by part."""
    plain = {one.dtype, other.dtype} <= TORCH_DTYPES.keys()
    if one.slices != other.slices or not plain or not one.slices:
        return False
    (_, rows), *inner = one.slices
    step = max(1, COMPARED // max(1, math.prod(stop for _, stop in inner)))
    rest = tuple(slice(*its) for its in inner)
    with SafetensorsFile(folder / one.file) as first, SafetensorsFile(folder / other.file) as last:
        mine, theirs = first.get_slice(one.key), last.get_slice(other.key)
        parts = ((slice(at, min(at + step, rows)), *rest) for at in range(0, rows, step))
        return all(torch.equal(mine[part].double(), theirs[part].double()) for part in parts)


def _further_layers(
    keys: Iterable[str], names: TensorNames, shape: Shape, config: Mapping[str, Any]
) -> list[str]:
    """Those of layers behind the model's that predict further tokens, as its configuration says."""
    counts = (config.get(key) for key in FURTHER_LAYERS)
    count = next((n for n in counts if isinstance(n, int)), 0)
    prefix = re.compile(re.escape(names.block).replace(r"\{\}", r"(\d+)") + r"\.")
    numbers = {key: int(found[1]) for key in keys if (found := prefix.match(key))}
    own = range(shape.layers, shape.layers + count)
    return sorted(key for key, number in numbers.items() if number in own)


def _left_out(folder: Path, further: list[str]) -> str:
    if not further:
        return ""
    return (
        f"{folder}: {further[0]} to {further[-1]}, {len(further)} tensors of layers that predict "
        "further tokens, are left out"
    )


def _with_prefix(found: dict[str, Box], names: TensorNames) -> dict[str, Box]:
    """The same by the names that they have in a file with a head."""
    prefix = names.optional_prefix
    head = (names.modules["head"], prefix)
    if any(key.startswith(head) for key in found):  # type: ignore[arg-type]
        return found
    return {prefix + key: box for key, box in found.items()}


def _check(folder: Path, key: str, box: Box | None, needed: tuple[int, ...]) -> None:
    """Check that a stored tensor is there, and is what the model needs."""
    if box is None:
        raise ValueError(
            f"{folder} has no {key}, which the plan's model needs; get the complete model"
        )
    if (has := tuple(stop for _, stop in box.slices)) != needed:
        raise ValueError(
            f"{folder / box.file}: {box.key} has shape {has}, the plan's model needs {needed}; "
            f"{CONFIG} and tensors are of different models"
        )
    if box.dtype not in READ_DTYPES:
        raise ValueError(
            f"{folder / box.file}: {box.key} is {box.dtype}; legal: {', '.join(READ_DTYPES)}"
        )


def _box(stored: Box, part: StoredPart) -> Box:
    """The part of a parameter that a stored tensor holds."""
    origin = tuple(start for start, _ in part.theirs)
    return Box(stored.file, stored.key, part.ours, stored.dtype, origin, part.transposed)


def _refuse_rest(folder: Path, rest: list[str], names: TensorNames) -> None:
    """Refuse tensors that the plan's model would not use."""
    ignored = re.compile(f"(.*\\.)?{names.ignored}")
    unused = sorted(key for key in rest if not ignored.fullmatch(key))
    if unused:
        others = f" and {len(unused) - 1} more" if unused[1:] else ""
        raise ValueError(
            f"{folder} has {unused[0]}{others}, which the plan's model lacks; give the plan the "
            f"model of this folder (model: FOLDER)"
        )
