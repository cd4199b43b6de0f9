"""`workbench weights`, and a plan that starts from what it wrote."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.test_session_checkpoint import save
from tests.conftest import Ask
from tests.parallel.small import GPT, LLAMA, plan
from workbench import verbs
from workbench.cli.app import answer
from workbench.engine.verify.forked_ranks import run_ranks
from workbench.errors import PlanError
from workbench.plan.model.parameter_count import parameters
from workbench.plan.schema import Plan
from workbench.runs.launch.preflight import preflight


def checkpoint(folder: Path, shape: dict[str, Any] = LLAMA) -> Path:
    run_ranks(
        1, partial(save, plan(shape=shape, changes={"training.global_batch": 8}).resolve(), folder)
    )
    return folder / "checkpoints" / "step-00000001"


def problems(made: Plan, root: Path) -> list[str]:
    return [
        str(found)
        for found in preflight(made, root=root, force=True)
        if found.field not in ("cluster.gpus", "port")
    ]


@pytest.mark.slow
def test_weights_go_out_and_start_a_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, to = checkpoint(tmp_path), tmp_path / "weights"
    assert answer(["weights", str(path), "--to", str(to), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["folder"], told["source"], told["dtype"]) == (str(to), str(path), "float32")
    assert told["files"] == ["model.safetensors"] and told["bytes"] == 4 * told["parameters"]
    assert answer(["weights", str(path), "--to", str(to), "--json"]) == 2
    assert "is there already" in json.loads(capsys.readouterr().out)["error"]
    start = {"checkpoint.load": str(to), "corpus.source": __file__, "training.sequence_length": 16}
    assert problems(Plan.of(str(to), set=start), tmp_path) == []
    (other,) = problems(
        Plan.of(str(to), set=start).replace(**{"model": {**LLAMA, "ffn": 64}}), tmp_path
    )
    assert other.startswith("model.ffn: is 64; in") and "it is 48" in other


def test_models_without_such_names_and_no_checkpoint_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = checkpoint(tmp_path, {**GPT, "norm": "rmsnorm"})
    with pytest.raises(ValueError, match=r"model\.norm: is 'rmsnorm', which GPT2"):
        verbs.weights(path, tmp_path / "weights")
    assert answer(["weights", str(tmp_path), "--to", str(tmp_path / "weights")]) == 2
    assert "SOURCE" in capsys.readouterr().err and not (tmp_path / "weights").exists()


def test_a_checkpoint_is_held_to_the_plan_before_launch(tmp_path: Path) -> None:
    path = checkpoint(tmp_path)
    start = {"checkpoint.load": str(path), "corpus.source": __file__}
    made = plan(changes={**start, "training.global_batch": 8})
    assert problems(made, tmp_path) == []
    for changes, words in (
        ({"training.global_batch": 12}, "training.global_batch: is 12, but"),
        ({"model": {**LLAMA, "rope_theta": 1e6}}, "model.rope_theta: is 1000000.0;"),
        ({"strategy.precision": "bf16"}, "strategy.precision: is 'bf16'"),
        ({"training.optimizer.name": "sgd"}, "training.optimizer.name: is 'sgd'"),
    ):
        (found,) = problems(made.replace(**changes), tmp_path)
        assert found.startswith(words) and str(path) in found
    (path / "manifest.json").write_text(
        (path / "manifest.json").read_text().replace("fp32", "bf16")
    )
    (found,) = problems(made, tmp_path)
    assert found.startswith("checkpoint.load:") and "manifest.json is damaged" in found


def test_a_gguf_file_generates_and_has_a_perplexity_on_any_mesh(tmp_path: Path, ask: Ask) -> None:
    pytest.importorskip("gguf", reason="the package gguf is not installed")
    from tests.checkpoint.gguf_samples import SHAPE, write_sample

    path, text = tmp_path / "a.gguf", tmp_path / "text.txt"
    write_sample(path, tokenizer=True)
    text.write_text("a text of bytes, " * 20)
    one, two = (verbs.generate(path, "ab", tokens=6, tensor=ranks) for ranks in (1, 2))
    assert one["tokens"] == two["tokens"] and one["prompt_tokens"] == 2
    assert len(one["tokens"]) == 6 or one["tokens"][-1] == 0
    seen: list[tuple[int, int, str]] = []
    found = verbs.perplexity(path, text, length=32, loading=lambda *item: seen.append(item))
    assert found["tokens"] == 340 - 11
    assert [done for done, _, _ in seen] == sorted({done for done, _, _ in seen})
    assert seen[-1][0] == seen[-1][1] == 4 * parameters(SHAPE).total
    code, _, said = ask("perplexity", path, text)
    assert code == 0 and said.startswith("loading weights, ")
    assert ask("perplexity", path, text, "--json")[2] == ""
    with pytest.raises(ValueError, match=r"^tokens: is 6, after 200000 of the prompt"):
        verbs.generate(path, "a" * 200_000, tokens=6)
    with pytest.raises(PlanError, match=r"^data: is 0; legal: whole numbers from 1"):
        verbs.perplexity(path, text, data=0)


REFUSED: list[tuple[tuple[str | int, ...], str]] = [
    (("generate", "a.gguf", "ab", "--tokens", 3000), "tokens: is 3000, after 2 of the prompt; the"),
    (("generate", "a.gguf", ""), "prompt: is empty"),
    (("generate", "a.gguf", "\udcff"), "prompt: is no UTF-8 text at character 0"),
    (("generate", "a.gguf", "ab", "--chat"), "has no chat template"),
    (("generate", "text.txt", "ab"), "is no intact GGUF file"),
    (("perplexity", "a.gguf", "text.txt", "--length", 3000), "length: is 3000; the model has"),
    (("perplexity", "a.gguf", "none.txt"), "none.txt' cannot be read: No such file"),
]


@pytest.mark.drawn(2)
@pytest.mark.parametrize(("words", "expected"), REFUSED)
def test_what_cannot_be_generated_is_refused_by_name(
    words: tuple[str | int, ...], expected: str, tmp_path: Path, ask: Ask
) -> None:
    pytest.importorskip("gguf", reason="the package gguf is not installed")
    from tests.checkpoint.gguf_samples import write_sample

    write_sample(tmp_path / "a.gguf", tokenizer=True)
    (tmp_path / "text.txt").write_text("a text of bytes, " * 20)
    files = ("a.gguf", "text.txt", "none.txt")
    code, _, said = ask(*(tmp_path / word if word in files else word for word in words))
    assert code == 2 and expected in said
