"""The hash that names base weights."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from workbench.errors import PlanError
from workbench.plan.base_weights import base_sha256
from workbench.plan.schema import Plan


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def test_weights_are_named_by_their_content(tmp_path: Path) -> None:
    gguf, folder, saved = tmp_path / "a.gguf", tmp_path / "weights", tmp_path / "step-00000001"
    gguf.write_bytes(b"gguf")
    assert base_sha256(gguf) == sha256(b"gguf")
    saved.mkdir()
    (saved / "manifest.json").write_bytes(b"{}")
    assert base_sha256(saved) == sha256(b"{}")
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    for name, content in zip(names, (b"one", b"two")):
        (folder / name).write_bytes(content)
    index = {"weight_map": dict(zip("ba", names))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    seen: list[tuple[int, int]] = []
    found = base_sha256(folder, progress=lambda done, of: seen.append((done, of)))
    both = b"".join(hashlib.sha256(it).digest() for it in (b"one", b"two"))
    assert found == sha256(both) and seen == [(3, 6), (6, 6)]
    (folder / names[1]).write_bytes(b"Two")
    assert base_sha256(folder) != found


def test_what_holds_no_weights_is_refused(tmp_path: Path) -> None:
    for path, words in (
        (tmp_path, "holds no weights; legal: a folder of Hugging Face weights, a GGUF file"),
        (tmp_path / "none", "does not exist; legal"),
    ):
        with pytest.raises(PlanError) as refused:
            base_sha256(path)
        assert str(refused.value).startswith(f"finetune.base: '{path}' {words}")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(PlanError, match=r"^finetune\.base: .* has neither model\.safetensors nor"):
        base_sha256(tmp_path)


def test_a_pinned_plan_names_its_base_by_hash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.gguf").write_bytes(b"gguf")
    (tmp_path / "text.txt").write_text("text")
    monkeypatch.chdir(tmp_path)
    start = {"finetune.base": "a.gguf", "corpus.source": "text.txt"}
    pinned = Plan.of("tiny", set=start).pin()
    assert pinned.finetune is not None and pinned.finetune.base == str(tmp_path / "a.gguf")
    assert pinned.finetune.base_sha256 == sha256(b"gguf")
    assert pinned.pin() == pinned
    (tmp_path / "adapter_model.safetensors").write_bytes(b"adapters")
    going_on = pinned.with_fields(**{"finetune.lora.initial": "."}).pin()
    assert going_on.lora is not None and going_on.lora.initial == str(tmp_path)
    assert going_on.lora.initial_sha256 == sha256(b"adapters")
    assert "initial_sha256" not in pinned.to_yaml()
    (tmp_path / "adapter_model.safetensors").write_bytes(b"others")
    with pytest.raises(PlanError, match=r"^finetune\.lora\.initial_sha256: the plan was resolved"):
        going_on.pin()
    (tmp_path / "a.gguf").write_bytes(b"others")
    with pytest.raises(PlanError, match=r"^finetune\.base_sha256: the plan was resolved with weig"):
        pinned.pin()
