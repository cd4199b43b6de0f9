"""A checkpoint of any mesh as a GGUF file: what is read back is what was written, rounded once."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("gguf", reason="the package gguf is not installed")

from gguf import GGMLQuantizationType as Kind
from gguf import dequantize, quantize

from tests.checkpoint.gguf_samples import SHAPE, write_sample
from tests.checkpoint.test_huggingface import BATCH, whole
from tests.checkpoint.test_session_checkpoint import save
from tests.parallel.small import LLAMA, plan
from workbench.engine.export.export_gguf import export_gguf
from workbench.engine.verify.forked_ranks import run_ranks
from workbench.errors import PlanError
from workbench.plan.catalog.gguf_config import read_gguf_config
from workbench.safe_io.gguf_files import open_gguf

WIDE = {**LLAMA, "hidden": 64, "ffn": 72}
"""Rows of 72 are no multiple of q8_0's blocks of 32."""


@pytest.fixture(scope="module", params=["none", "qkv"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint written by tensor x data ranks in fp32."""
    folder = tmp_path_factory.mktemp("gguf")
    made = plan(2, 1, 2, shape={**WIDE, "biases": request.param}, changes=BATCH).resolve()
    run_ranks(4, partial(save, made, folder))
    return folder / "checkpoints" / "step-00000001"


@pytest.mark.parametrize("kind", ["f32", "f16", "bf16", "q8_0"])
def test_a_file_that_is_written_is_read_back(checkpoint: Path, kind: str, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    answer = export_gguf(checkpoint, file, kind)
    shape = read_gguf_config(file)
    biases = "qkv" if open_gguf(file).get("general.architecture") == "qwen2" else "none"
    given = {**WIDE, "name": shape.name, "biases": biases}
    assert shape == plan(shape=given, changes=BATCH).resolve().shape
    changes = {**BATCH, "model": given, "strategy.precision": "fp32"}
    read = plan(changes={**changes, "checkpoint.load": str(file)}).resolve()
    original = whole(plan(changes={**changes, "checkpoint.load": str(checkpoint)}).resolve())
    for (name, what), value in whole(read).items():
        if what == "parameter":
            expected = rounded(original[name, what], kind)
            assert np.array_equal(value, expected), (name, kind)
    down = [f"blk.{n}.ffn_down.weight" for n in range(4)]
    assert answer["f16_instead"] == (down if kind == "q8_0" else [])


def rounded(value: np.ndarray, kind: str) -> np.ndarray:
    """A parameter as the file holds it: a vector in fp32, rows of 72 in f16 in q8_0's place."""
    kind = "f32" if value.ndim == 1 else "f16" if kind == "q8_0" and value.shape[-1] % 32 else kind
    dtypes = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
    if kind in dtypes:
        return torch.from_numpy(value).to(dtypes[kind]).float().numpy()
    found: np.ndarray = dequantize(quantize(value, Kind.Q8_0), Kind.Q8_0)
    return found


def test_the_tokenizer_of_a_file_is_copied_with_the_vocabularys_size(tmp_path: Path) -> None:
    given = tmp_path / "given.gguf"
    write_sample(given, tokenizer=True)
    made = plan(shape={**WIDE, "vocab": SHAPE.vocab}, changes=BATCH).resolve()
    run_ranks(1, partial(save, made, tmp_path))
    checkpoint = tmp_path / "checkpoints" / "step-00000001"
    export_gguf(checkpoint, tmp_path / "model.gguf", tokenizer=given)
    one, other = open_gguf(given), open_gguf(tmp_path / "model.gguf")
    keys = one.fields("tokenizer.").keys()
    assert "tokenizer.ggml.tokens" in keys and keys == other.fields("tokenizer.").keys()
    assert [one.get(key) for key in keys] == [other.get(key) for key in keys]


def test_what_a_file_cannot_hold_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    given = tmp_path / "given.gguf"
    write_sample(given, tokenizer=True)
    for name, more, words in (
        ("geglu", {"mlp": "geglu"}, r"model\.mlp: is 'geglu'.*legal: swiglu"),
        ("windowed", {"window": 8}, r"model\.window: is 8"),
        ("other", {}, r"--tokenizer: .*has 259 tokens; the model's vocabulary is 257"),
    ):
        folder = tmp_path / name
        run_ranks(1, partial(save, plan(changes=BATCH, **more).resolve(), folder))
        with pytest.raises(PlanError, match=words):
            export_gguf(
                folder / "checkpoints" / "step-00000001", folder / "model.gguf", tokenizer=given
            )
        assert [path.name for path in folder.iterdir()] == ["checkpoints"]
    with pytest.raises(PlanError, match="is there already"):
        export_gguf(tmp_path / "other" / "checkpoints" / "step-00000001", given)
