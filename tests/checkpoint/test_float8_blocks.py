"""Weights in fp8 with a scale for each block are read as a plain dequantisation has them, on any
mesh; layers that predict further tokens are left out.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.checkpoint.test_huggingface import state
from tests.checkpoint.test_session_checkpoint import session_of
from tests.parallel.family_table import shape
from tests.parallel.small import plan
from workbench.checkpoint.huggingface.huggingface_names import (
    config_json,
    huggingface_source,
    stored_parts,
)
from workbench.engine.session_checkpoint import SessionCheckpointer
from workbench.engine.verify.forked_ranks import run_ranks
from workbench.plan.catalog.families.stored_parts import stored_extents
from workbench.plan.catalog.families.table import FAMILIES

BLOCK = 5, 7
"""Divides no side of any weight."""
SMALL = shape("deepseek_v3")
FAMILY = FAMILIES["deepseek_v3"]
Files = dict[str, dict[str, Tensor]]


def dequantised(weight: Tensor, scales: Tensor) -> Tensor:
    rows, columns = weight.shape
    spread = scales.repeat_interleave(BLOCK[0], 0)[:rows].repeat_interleave(BLOCK[1], 1)
    return weight.float() * spread[:, :columns]


def random_files() -> tuple[Files, dict[str, Tensor]]:
    """Two files, the scales of some weights in the other; and every tensor, dequantised."""
    random = torch.Generator().manual_seed(0)
    files: Files = {"a.safetensors": {}, "b.safetensors": {}}
    plain = {}
    for i, (key, extent) in enumerate(stored_extents(stored_parts(FAMILY, SMALL)).items()):
        value = torch.randn(extent, generator=random)
        own, other = list(files.values())[:: 1 if i % 2 else -1]
        if not key.endswith("_proj.weight") and "mqa" not in key:
            plain[key] = own[key] = value
            continue
        sides = [-(-n // block) for n, block in zip(extent, BLOCK)]
        own[key] = value.to(torch.float8_e4m3fn)
        scales = torch.rand(sides, generator=random) + 0.5
        (other if i % 3 else own)[f"{key}_scale_inv"] = scales
        plain[key] = dequantised(own[key], scales)
    further = f"model.layers.{SMALL.layers}"
    files["b.safetensors"] |= {
        f"{further}.eh_proj.weight": torch.zeros(4, 4),
        f"{further}.enorm.weight": torch.zeros(4),
    }
    return files, plain


def write(folder: Path, files: Files, **more: Any) -> None:
    for name, tensors in files.items():
        save_file(tensors, folder / name)
    listed = {key: name for name, tensors in files.items() for key in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))
    quantised = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(BLOCK)}
    config = config_json(SMALL, torch.float32, FAMILY) | {
        "quantization_config": quantised,
        "num_nextn_predict_layers": 1,
        **more,
    }
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("mesh", [(1, 1, 1), (2, 1, 2)], ids=str)
def test_every_rank_has_the_dequantised_slices(mesh: tuple[int, int, int], tmp_path: Path) -> None:
    files, plain = random_files()
    write(tmp_path, files)
    expected = {}
    for name, parts in stored_parts(FAMILY, SMALL).items():
        expected[name] = np.zeros(
            [max(part.ours[d][1] for part in parts) for d in range(len(parts[0].ours))], np.float32
        )
        for part in parts:
            value = plain[part.key][tuple(slice(*its) for its in part.theirs)]
            into = tuple(slice(*its) for its in part.ours)
            expected[name][into] = value.numpy().reshape(expected[name][into].shape)
    changes = {
        "strategy.data.zero": 3,
        "strategy.expert.size": mesh[2],
        "checkpoint.load": str(tmp_path),
    }
    made = plan(*mesh, shape=SMALL.model_dump(), changes=changes).resolve()
    seen = set()
    for _, shards in run_ranks(mesh[0] * mesh[1] * mesh[2], partial(state, made)):
        for name, kind, slices, value in shards:
            if kind == "parameter":
                seen.add(name)
                wanted = expected[name][tuple(slice(*its) for its in slices)]
                assert np.array_equal(value, wanted), name
    assert seen == expected.keys()


def test_layers_that_predict_further_tokens_are_left_out_and_said(tmp_path: Path) -> None:
    files, _ = random_files()
    write(tmp_path, files)
    made = plan(shape=SMALL.model_dump(), changes={"checkpoint.load": str(tmp_path)}).resolve()
    words = r"model\.layers\.4\.eh_proj\.weight to model\.layers\.4\.enorm\.weight, 2 tensors"
    with pytest.warns(UserWarning, match=words):
        SessionCheckpointer(session_of(made, 0), Path("unused")).load()
    write(tmp_path, files, num_nextn_predict_layers=0)
    with pytest.raises(ValueError, match=r"has model\.layers\.4\.eh_proj\.weight and 1 more"):
        huggingface_source(tmp_path, SMALL)


def without_scales(files: Files, key: str) -> None:
    for tensors in files.values():
        tensors.pop(f"{key}_scale_inv", None)


def of_other_blocks(files: Files, key: str) -> None:
    without_scales(files, key)
    files["a.safetensors"][f"{key}_scale_inv"] = torch.ones(1, 1)


@pytest.mark.parametrize(
    ("spoil", "more", "words"),
    [
        (without_scales, {}, r"is F8_E4M3, and .* has no .*o_proj\.weight_scale_inv"),
        (
            of_other_blocks,
            {},
            r"o_proj\.weight_scale_inv is F32 \[1, 1\], and scales of \[32, 32\]",
        ),
        (lambda files, key: None, {"quantization_config": None}, "no quantization_config"),
        (
            lambda files, key: None,
            {"quantization_config": {"quant_method": "fp8"}},
            r'quantization_config \{"quant_method": "fp8"\}; weights are read only',
        ),
    ],
)
def test_weights_without_their_scales_are_refused(
    spoil: Callable[[Files, str], None], more: dict[str, Any], words: str, tmp_path: Path
) -> None:
    files, _ = random_files()
    spoil(files, "model.layers.0.self_attn.o_proj.weight")
    write(tmp_path, files, **more)
    with pytest.raises(ValueError, match=words):
        huggingface_source(tmp_path, SMALL)
