"""Resuming: the newest intact checkpoint is taken, another corpus is refused, and what changes is
said by field before a rank starts.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from workbench.checkpoint.manifest import VERSION, manifest_text
from workbench.checkpoint.resume_changes import resume_notes
from workbench.checkpoint.resume_point import checkpoint_meta
from workbench.errors import PlanError
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.schema import Plan
from workbench.runs import Run
from workbench.runs.launch import checked_launch
from workbench.runs.launch.earlier_launch import go_on, nothing_left
from workbench.runs.launch.external_launcher import ExternalRun
from workbench.runs.store.run_state import first_state, stored_state, write_state

TENSORS = "rank00000.safetensors"
CHAT = "{{ messages[0].content }}"


def saved(plan: ResolvedPlan, folder: Path, step: int, meta: dict[str, Any] | None = None) -> Path:
    """A checkpoint of `plan` after `step` steps, whose tensors nobody reads."""
    path = folder / f"step-{step:08d}"
    path.mkdir(parents=True)
    (path / TENSORS).write_bytes(content := bytes(range(256)) * step)
    sha256 = hashlib.sha256(content).hexdigest()
    file = {"file": TENSORS, "bytes": len(content), "sha256": sha256, "tensors": []}
    written = checkpoint_meta(plan, step) if meta is None else meta
    body = {"version": VERSION, "meta": written, "files": [file]}
    (path / "manifest.json").write_text(manifest_text(body))
    return path


@pytest.fixture
def former(plan: Plan, tmp_path: Path) -> Path:
    """A run of five steps with checkpoints of the second, third and fourth."""
    folder, full = tmp_path / "former", plan.pin()
    for step in (2, 3, 4):
        saved(full, folder / "checkpoints", step)
    (folder / "plan.yaml").write_text(full.to_yaml())
    write_state(folder, first_state(3, 5))
    return folder


@pytest.fixture
def resumed(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Run]:
    """`resumed(source, **changes)` writes the run directory, and starts nothing."""
    monkeypatch.setattr(checked_launch, "_supervise", lambda folder: None)

    def begin(source: Path, new_corpus: bool = False, **changes: Any) -> Run:
        fields = {name.replace("__", "."): value for name, value in changes.items()}
        return checked_launch.start(
            plan.replace(**fields), resume=source, new_corpus=new_corpus, root=tmp_path / "runs"
        )

    return begin


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1 << at % 8
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def fill_with_nan(folder: Path) -> None:
    body = json.loads((folder / "manifest.json").read_text())
    body.pop("sha256")
    body["meta"]["finite"] = False
    (folder / "manifest.json").write_text(manifest_text(body))


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "flipped first byte": (lambda at: flip(at / TENSORS, 0), "does not match its checksum"),
    "flipped byte": (lambda at: flip(at / TENSORS, 301), "does not match its checksum"),
    "cut file": (lambda at: cut(at / TENSORS), "bytes instead of"),
    "empty file": (lambda at: (at / TENSORS).write_bytes(b""), "0 bytes instead of"),
    "missing file": (lambda at: (at / TENSORS).unlink(), "cannot be read: No such file"),
    "missing manifest": (lambda at: (at / "manifest.json").unlink(), "it has no manifest.json"),
    "flipped manifest": (lambda at: flip(at / "manifest.json", 40), "manifest.json is damaged"),
    "cut manifest": (lambda at: cut(at / "manifest.json"), "manifest.json is damaged"),
    "NaN": (fill_with_nan, "has NaN or infinite values"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_run_is_resumed_from_its_newest_intact_checkpoint_and_others_are_named(
    kind: str, former: Path, resumed: Callable[..., Run], capsys: pytest.CaptureFixture[str]
) -> None:
    do, why = DAMAGES[kind]
    newest, middle, oldest = (former / f"checkpoints/step-0000000{n}" for n in (4, 3, 2))
    assert Path(str(resumed(former).plan.checkpoint.load)) == newest
    do(newest)
    with pytest.raises(PlanError, match=f"{why}.*the newest intact one is '{middle}'"):
        resumed(newest)
    with pytest.raises(PlanError, match=f"{why}.*the newest intact one is '{middle}'"):
        resumed(None, checkpoint__load=str(newest))
    again = resumed(former)
    assert Path(str(again.plan.checkpoint.load)) == middle
    (note,) = again.state.notes
    assert note.startswith("skipped ") and str(newest) in note and why in note
    assert note in capsys.readouterr().err and note in repr(again)
    for other in (middle, oldest):
        do(other)
    with pytest.raises(PlanError, match="holds no intact checkpoint") as refused:
        resumed(former)
    assert all(f"{at}" in str(refused.value) for at in (newest, middle, oldest))
    with pytest.raises(PlanError, match="none beside it is intact"):
        resumed(newest)


def test_checkpoints_older_than_the_one_that_is_taken_are_not_read(
    former: Path, resumed: Callable[..., Run]
) -> None:
    shutil.rmtree(former / "checkpoints/step-00000002")
    (former / "checkpoints/step-00000003" / TENSORS).unlink()
    assert resumed(former).state.notes == []


def test_an_exported_plan_goes_on_from_its_newest_intact_checkpoint(
    former: Path, plan: Plan, capsys: pytest.CaptureFixture[str]
) -> None:
    flip(former / "checkpoints/step-00000004" / TENSORS, 9)
    (former / "state.json").unlink()
    going_on, skipped = go_on(plan.pin(), former)
    assert str(going_on.checkpoint.load).endswith("step-00000003")
    kept = ExternalRun(former, 0)
    kept.begin(going_on, skipped)
    kept.end(0)
    (note,) = stored_state(former).notes
    assert "step-00000004" in note and note in capsys.readouterr().err
    for name in ("step-00000003", "step-00000002"):
        cut(former / "checkpoints" / name / TENSORS)
    with pytest.raises(PlanError, match=r"no intact checkpoint: .*00004.*00003.*00002"):
        go_on(plan.pin(), former)


def corpus(folder: Path, name: str, content: str) -> str:
    (folder / name).write_text(content)
    return str(folder / name)


def other_text(folder: Path) -> dict[str, Any]:
    return {"corpus__source": corpus(folder, "other.txt", "not to be " * 200)}


def appended(folder: Path) -> dict[str, Any]:
    with (folder / "corpus.txt").open("a") as file:
        file.write("one line more\n")
    return {}


def moved(folder: Path) -> dict[str, Any]:
    """The content counts, not its name."""
    return {"corpus__source": str(shutil.copy(folder / "corpus.txt", folder / "moved.txt"))}


def mixed(folder: Path) -> dict[str, Any]:
    more = {"source": corpus(folder, "more.txt", "more of it " * 200), "weight": 1}
    return {"corpus": {"mix": [{"source": str(folder / "corpus.txt"), "weight": 1}, more]}}


def one_of_a_mix(folder: Path) -> dict[str, Any]:
    unused = {"source": corpus(folder, "more.txt", "more of it " * 200), "weight": 0}
    return {"corpus": {"mix": [unused, {"source": str(folder / "corpus.txt"), "weight": 3}]}}


CORPORA: list[tuple[Any, str]] = [
    (moved, ""),
    (one_of_a_mix, ""),
    (other_text, "corpus.source"),
    (appended, "corpus.source"),
    (mixed, "corpus.mix"),
    (lambda folder: {"corpus__tokenizer": "bpe", "model__vocab": 512}, "corpus.tokenizer"),
    (lambda folder: {"corpus__format": "jsonl"}, "corpus.format"),
    (lambda folder: {"corpus__holdout": 0.1}, "corpus.holdout"),
    (lambda folder: {"corpus__separate_documents": True}, "corpus.separate_documents"),
]


@pytest.mark.parametrize(("change", "field"), CORPORA)
def test_another_corpus_is_refused_by_field_unless_it_is_allowed(
    change: Callable[[Path], dict[str, Any]],
    field: str,
    plan: Plan,
    tmp_path: Path,
    resumed: Callable[..., Run],
) -> None:
    model = {"model": {**plan.resolve().shape.model_dump(), "vocab": 512}}
    checkpoint = saved(plan.replace(**model).pin(), tmp_path / "checkpoints", 2)
    changes = model | {k: v for k, v in change(tmp_path).items() if k != "model__vocab"}
    if not field:
        assert resumed(checkpoint, **changes).state.notes == []
        return
    with pytest.raises(PlanError) as refused:
        resumed(checkpoint, **changes)
    assert {problem.field for problem in refused.value.problems} == {field}
    assert "--new-corpus" in str(refused.value) and not (tmp_path / "runs").exists()
    with pytest.raises(PlanError, match=field):
        resumed(None, checkpoint__load=str(checkpoint), **changes)
    again = resumed(checkpoint, new_corpus=True, **changes)
    (note,) = again.state.notes
    assert note.startswith(f"{field} is ") and again.plan.checkpoint.new_corpus


def test_a_source_of_a_mix_is_named_by_its_place(
    plan: Plan, tmp_path: Path, resumed: Callable[..., Run]
) -> None:
    changes = mixed(tmp_path)
    checkpoint = saved(plan.replace(**changes).pin(), tmp_path / "checkpoints", 2)
    for part, weight in zip(changes["corpus"]["mix"], (2, 2), strict=True):
        part["weight"] = weight
    assert resumed(checkpoint, **changes).state.notes == []
    changes["corpus"]["mix"][0]["weight"] = 1
    corpus(tmp_path, "more.txt", "less of it " * 200)
    with pytest.raises(PlanError) as refused:
        resumed(checkpoint, **changes)
    named = {problem.field for problem in refused.value.problems}
    assert named == {"corpus.mix.0.weight", "corpus.mix.1.weight", "corpus.mix.1.source"}


@pytest.mark.parametrize("file", ["tokenizer", "template", "own template"])
def test_another_tokenizer_or_template_is_refused_by_field(
    file: str, plan: Plan, tmp_path: Path, resumed: Callable[..., Run]
) -> None:
    from tokenizers import Tokenizer, models

    (tmp_path / "t").mkdir()
    tokenizer = Tokenizer(models.WordLevel({"to": 0, "be": 1, "<eos>": 2}))
    own = corpus(tmp_path / "t", "tokenizer.json", tokenizer.to_str())
    settings = json.dumps({"chat_template": CHAT, "eos_token": "<eos>"})
    beside = corpus(tmp_path / "t", "tokenizer_config.json", settings)
    given = {"tokenizer": own, "end_of_text": "<eos>"}
    if file == "template":
        given = {"template": corpus(tmp_path, "chat.jinja", CHAT), "tokenizer": "bytes"}
    rows = [{"messages": [{"role": r, "content": "to be"} for r in ("user", "assistant")]}] * 99
    chats = corpus(tmp_path, "chats.jsonl", "\n".join(map(json.dumps, rows)))
    changes = {"corpus": {"source": chats, **given}}
    checkpoint = saved(plan.replace(**changes).pin(), tmp_path / "checkpoints", 2)
    assert resumed(checkpoint, **changes).state.notes == []
    path = Path({"tokenizer": own, "own template": beside}.get(file, given.get("template", "")))
    path.write_text(path.read_text().replace('"to"', '"so"').replace("content", "content + 'x'"))
    named = rf"^corpus\.{file.split()[-1]}: is content of sha256 \w{{12}}, "
    with pytest.raises(PlanError, match=named):
        resumed(checkpoint, **changes)


STEP_2 = 3e-4 * (0.1 + 0.9 * 0.5)
"""Cosine at the middle of five steps."""
SCHEDULES: list[tuple[dict[str, Any], list[str]]] = [
    ({}, []),
    ({"strategy__preset": "zero-1", "training__micro_batch": 1}, []),
    (
        {"training__steps": 9},
        ["training.steps is 9, ", f"learning rate: {STEP_2:.2e} planned at step 2, 2.60e-04 taken"],
    ),
    (
        {"training__optimizer__learning_rate": 1e-3},
        ["training.optimizer.learning_rate is 0.001, ", "learning rate: 1.65e-04 planned at step"],
    ),
    ({"training__sequence_length": 32}, ["training.sequence_length is 32, "]),
    ({"training__seed": 9}, ["training.seed is 9, "]),
    (
        {"training__global_batch": 6},
        [
            "training.global_batch is 6, ",
            "learning rate: 1.65e-04 planned at step 2, 3.00e-05 taken at step 4",
        ],
    ),
]


@pytest.mark.parametrize(("changes", "said"), SCHEDULES)
def test_other_batches_and_another_schedule_are_said_by_field(
    changes: dict[str, Any],
    said: list[str],
    plan: Plan,
    tmp_path: Path,
    resumed: Callable[..., Run],
) -> None:
    base = {"training.global_batch": 12, "training.sequence_length": 16}
    checkpoint = saved(plan.replace(**base).pin(), tmp_path / "checkpoints", 2)
    found = resumed(
        checkpoint, **{"training__global_batch": 12, "training__sequence_length": 16} | changes
    ).state.notes
    assert len(found) == len(said), found
    assert all(note.startswith(words) for note, words in zip(found, said, strict=True)), found


def test_fine_tuning_is_named_by_its_own_fields(
    plan: Plan, tmp_path: Path, resumed: Callable[..., Run]
) -> None:
    tuned = plan.replace(training=None, finetune={"steps": 5, "lora": {"rank": 2}})
    checkpoint = saved(tuned.pin(), tmp_path / "checkpoints", 2)
    longer = {"training": None, "finetune": {"steps": 9, "lora": {"rank": 2}}}
    assert resumed(checkpoint, **longer).state.notes[0].startswith("finetune.steps is 9, ")
    with pytest.raises(PlanError, match=r"^finetune\.steps: is 2, .* has done 2: nothing is left"):
        resumed(checkpoint, **longer | {"finetune": {"steps": 2, "lora": {"rank": 2}}})


def test_a_checkpoint_that_does_not_say_its_corpus_resumes_and_that_is_said(
    plan: Plan, tmp_path: Path, resumed: Callable[..., Run]
) -> None:
    meta = checkpoint_meta(plan.pin(), 2)
    meta.pop("trained_on")
    checkpoint = saved(plan.resolve(), tmp_path / "older", 2, meta)
    (note,) = resumed(checkpoint, **other_text(tmp_path)).state.notes
    assert "does not say its corpus" in note and "is not checked" in note
    checkpoint = saved(plan.resolve(), tmp_path / "unhashed", 2)
    (note,) = resumed(checkpoint, **other_text(tmp_path)).state.notes
    assert "does not name its corpus by hash: it is not compared" in note


@pytest.mark.parametrize("steps", [4, 3])
def test_where_nothing_is_left_to_train_that_is_said(
    steps: int, former: Path, plan: Plan, tmp_path: Path, resumed: Callable[..., Run]
) -> None:
    words = rf"^training\.steps: is {steps}, .*step-00000004.* has done 4: nothing is left to train"
    with pytest.raises(PlanError, match=words):
        resumed(former, training__steps=steps)
    assert not (tmp_path / "runs").exists()
    load = str(former / "checkpoints/step-00000004")
    full = plan.replace(**{"checkpoint.load": load, "training.steps": steps}).pin()
    assert "has done 4: nothing is left" in resume_notes(full)[-1]
    (former / "plan.yaml").write_text(full.to_yaml())
    assert "has done 4: nothing is left to train" in nothing_left(former / "plan.yaml")
