"""Weights under the names that a family has in transformers.

A folder holds config.json and model.safetensors, or shards of it that model.safetensors.index.json
lists.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from workbench.checkpoint.huggingface_folder import check_config, refuse_inexpressible
from workbench.checkpoint.resume_point import CONFIG
from workbench.checkpoint.safetensors_writer import TORCH_DTYPES
from workbench.checkpoint.tensor_index import Box, StoredTensor, TensorSource
from workbench.models import Transformer
from workbench.plan.catalog.families.family import TensorNames
from workbench.plan.catalog.families.table import family_of
from workbench.plan.model.model_shape import Shape

SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
WEIGHT_KINDS = ("parameter", "master")
"""Kinds of training state that weights alone can fill."""
IGNORED_TENSORS = re.compile(r".*rotary_emb\.inv_freq")
"""Tensors that the configuration determines."""


def parameter_shapes(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Global name -> shape of all parameters, tied ones once."""
    with torch.device("meta"):
        return {name: tuple(p.shape) for name, p in Transformer(shape).named_parameters()}


def huggingface_names(shape: Shape) -> TensorNames:
    """Names in transformers of a model's parameters.

    Raises:
        PlanError: No family's names can express the model; names every field that they cannot.
    """
    refuse_inexpressible(shape)
    names = family_of(shape).names
    assert names is not None, "what can be expressed has names"
    return names


def config_json(shape: Shape, dtype: torch.dtype) -> dict[str, Any]:
    """Content of config.json, as the family of the shape has it."""
    family = family_of(shape)
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
    check_config(folder, shape)
    sizes, found = {}, {}
    for file in _files(folder):
        sizes[file] = ((folder / file).stat().st_size, None)
        for key, dtype, extent in _headers(folder / file):
            found[key] = Box(file, key, tuple((0, n) for n in extent), dtype)
    tensors: dict[tuple[str, str], StoredTensor] = {}
    names = huggingface_names(shape)
    for name, needed in parameter_shapes(shape).items():
        box = found.pop(names.name(name), None)
        if box is None:
            raise ValueError(
                f"{folder} has no {names.name(name)}, which the plan's model needs; get the "
                f"complete model"
            )
        has = tuple(stop for _, stop in box.slices)
        if has != needed:
            raise ValueError(
                f"{folder / box.file}: {box.key} has shape {has}, the plan's model needs {needed}; "
                f"{CONFIG} and tensors are of different models"
            )
        if box.dtype not in TORCH_DTYPES:
            raise ValueError(
                f"{folder / box.file}: {box.key} is {box.dtype}; legal: {', '.join(TORCH_DTYPES)}"
            )
        tensors |= {(name, kind): StoredTensor(needed, [box]) for kind in WEIGHT_KINDS}
    tied = {names.name("head.weight")} if shape.tied else set()
    _refuse_rest(folder, set(found) - tied)
    return TensorSource(folder, tensors, sizes, {}, exact=False)


def _files(folder: Path) -> list[str]:
    if (folder / SINGLE_FILE).is_file():
        return [SINGLE_FILE]
    path = folder / INDEX_FILE
    try:
        files = sorted(set(json.loads(path.read_text())["weight_map"].values()))
    except FileNotFoundError:
        raise ValueError(
            f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}; save the model as safetensors"
        ) from None
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"{path} is no index of a model: {error!r}; get the file again") from None
    for file in files:
        if not isinstance(file, str) or Path(file).name != file or not (folder / file).is_file():
            raise ValueError(f"{path} lists {file!r}, which is not there; get the complete model")
    return files


def _headers(path: Path) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """(name, dtype, shape) of each tensor of a file."""
    try:
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 - no mapping
                view = file.get_slice(key)
                yield key, view.get_dtype(), tuple(view.get_shape())
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} is damaged: {error}; get the file again") from None


def _refuse_rest(folder: Path, rest: set[str]) -> None:
    """Refuse tensors that the plan's model would not use."""
    unused = sorted(key for key in rest if not IGNORED_TENSORS.fullmatch(key))
    if unused:
        others = f" and {len(unused) - 1} more" if unused[1:] else ""
        raise ValueError(
            f"{folder} has {unused[0]}{others}, which the plan's model lacks; give the plan the "
            f"model of this folder (model: FOLDER)"
        )
