"""Which checkpoint is meant, and what a manifest may say: nothing outside of the checkpoint's own
folder is touched.
"""

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from workbench.checkpoint.intact_checkpoints import checkpoint_of
from workbench.checkpoint.manifest import VERSION, manifest_text, read_manifest
from workbench.checkpoint.resume_point import (
    checkpoint_meta,
    checkpoint_shape,
    finished_checkpoints,
    steps_done,
)
from workbench.errors import PlanError
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.schema import Plan
from workbench.runs.launch import checked_launch
from workbench.runs.run import profile_of

TENSOR = {
    "key": "parameter/w",
    "name": "w",
    "kind": "parameter",
    "dtype": "F32",
    "shape": [4, 2],
    "slices": [[0, 4], [0, 1]],
}
FILE = {
    "file": "rank00000.safetensors",
    "bytes": 8,
    "sha256": sha256(bytes(8)).hexdigest(),
    "tensors": [TENSOR],
}


def whole(
    folder: Path, meta: None = None, files: list[dict[str, Any]] | tuple[dict[str, Any]] = (FILE,)
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / str(FILE["file"])).write_bytes(bytes(8))
    body = {"version": VERSION, "meta": {} if meta is None else meta, "files": list(files)}
    (folder / "manifest.json").write_text(manifest_text(body))
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run directory whose telemetry is lost."""
    folder = tmp_path / "run"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "state.json").write_text("{}")
    (folder / "plan.yaml").write_text(Plan.of("tiny", gpu="local", gpus=1).to_yaml())
    return folder


def test_the_latest_whole_checkpoint_is_found_without_telemetry(run: Path) -> None:
    with pytest.raises(PlanError, match=r"resume: .*holds no checkpoint; set checkpoint\.every"):
        checkpoint_of(run)
    for step in (9, 100):
        whole(run / f"checkpoints/step-{step:08d}")
    for name in ("step-00000200", "step-00000300.writing-abc", "other"):
        (run / "checkpoints" / name).mkdir()
    whole(run / "checkpoints/step-00000300.writing-abc")
    assert [path.name for path in finished_checkpoints(run / "checkpoints")] == [
        "step-00000009",
        "step-00000100",
    ]
    assert (
        checkpoint_of(run) == run / "checkpoints/step-00000100"
    )  # 200 is not whole, 300 has not got its name
    assert checkpoint_of(run / "checkpoints/step-00000009").name == "step-00000009"
    assert profile_of(run).notes["checkpoints"] == [
        str(path) for path in finished_checkpoints(run / "checkpoints")
    ]
    with pytest.raises(PlanError, match=r"it has no manifest\.json.*newest intact one is '.*100'"):
        checkpoint_of(run / "checkpoints/step-00000200")
    with pytest.raises(PlanError, match="is neither"):
        checkpoint_of(run / "checkpoints/other")
    with pytest.raises(PlanError, match="does not exist"):
        checkpoint_of(run / "none")


def test_a_run_that_died_before_its_first_checkpoint_leads_back_to_the_one_it_went_on_from(
    run: Path, tmp_path: Path
) -> None:
    former = whole(tmp_path / "former/checkpoints/step-00000007")
    plan = Plan.load(run / "plan.yaml").replace(**{"checkpoint.load": str(former)})
    (run / "plan.yaml").write_text(plan.to_yaml())
    assert checkpoint_of(run) == former
    own = whole(run / "checkpoints/step-00000008")
    assert checkpoint_of(run) == own
    (own / "manifest.json").unlink()
    (former / "manifest.json").unlink()
    with pytest.raises(PlanError, match=f"the one it resumed from is gone: {former}"):
        checkpoint_of(run)


def test_a_run_that_started_from_weights_says_that_it_holds_no_checkpoint(
    run: Path, tmp_path: Path
) -> None:
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights/config.json").write_text("{}")
    plan = Plan.load(run / "plan.yaml").replace(**{"checkpoint.load": str(tmp_path / "weights")})
    (run / "plan.yaml").write_text(plan.to_yaml())
    with pytest.raises(PlanError, match=r"holds no checkpoint; set checkpoint\.every"):
        checkpoint_of(run)


@pytest.mark.parametrize(
    "cause, words", [("no\ntemplate", "failed: no template"), (7, "set check")]
)
def test_a_run_that_failed_before_its_first_checkpoint_says_why(
    run: Path, cause: Any, words: str
) -> None:
    state = {"phase": "failed", "cause": {"message": cause}}
    (run / "state.json").write_text(json.dumps(state))
    with pytest.raises(PlanError, match=f"SOURCE: .*holds no checkpoint.*{words}"):
        checkpoint_of(run, "SOURCE")


def test_a_run_whose_plan_is_damaged_says_so(run: Path) -> None:
    (run / "plan.yaml").write_text("model: [")
    with pytest.raises(PlanError, match="holds no checkpoint, and its plan cannot be read"):
        checkpoint_of(run)


def test_links_are_no_checkpoints(run: Path, tmp_path: Path) -> None:
    outside = whole(tmp_path / "outside/step-00000005")
    (run / "checkpoints/step-00000005").symlink_to(outside)
    assert finished_checkpoints(run / "checkpoints") == []
    (run / "checkpoints/step-00000005").unlink()
    (run / "checkpoints").rmdir()
    (run / "checkpoints").symlink_to(outside.parent)
    assert finished_checkpoints(run / "checkpoints") == []


@pytest.mark.parametrize(
    "name",
    [
        "../../../outside.safetensors",
        "/outside.safetensors",
        "a/b",
        "a\\b",
        "..",
        ".",
        "",
        ".hidden",
        "a\0b",
        5,
    ],
)
def test_a_file_outside_of_the_checkpoint_is_refused(tmp_path: Path, name: int | str) -> None:
    whole(tmp_path, files=[FILE, {**FILE, "file": name}])
    with pytest.raises(
        ValueError, match=r"manifest.json is damaged: files\[1\] .*checkpoint\.load"
    ):
        read_manifest(tmp_path)


def test_a_link_to_a_file_outside_is_refused(tmp_path: Path) -> None:
    (tmp_path / str(FILE["file"])).symlink_to("/etc/hostname")
    with pytest.raises(
        ValueError, match=r"rank00000.safetensors is a link; legal: a file in the checkpoint's own"
    ):
        read_manifest(whole(tmp_path))


@pytest.mark.parametrize(
    "files",
    [
        5,
        {"a": FILE},
        [5],
        [None],
        [[]],
        ["rank00000.safetensors"],
        [{}],
        *(
            [{**FILE, field: value}]
            for field, value in (
                ("bytes", -1),
                ("bytes", "8"),
                ("bytes", True),
                ("sha256", None),
                ("tensors", 5),
                ("tensors", [5]),
            )
        ),
        *(
            [{**FILE, "tensors": [{**TENSOR, field: value}]}]
            for field, value in (
                ("key", None),
                ("name", 5),
                ("kind", []),
                ("dtype", {}),
                ("shape", [4]),
                ("shape", ["4", 2]),
                ("slices", [[0, 4]]),
                ("slices", [[0, 5], [0, 1]]),
                ("slices", [[3, 2], [0, 1]]),
                ("slices", [[0], [0]]),
                ("slices", 5),
                ("slices", [[-1, 2], [0, 1]]),
            )
        ),
    ],
    ids=json.dumps,
)
def test_a_manifest_of_another_form_is_refused(tmp_path: Path, files: Any) -> None:
    body = {"version": VERSION, "meta": {}, "files": files}
    (tmp_path / "manifest.json").write_text(manifest_text(body))
    with pytest.raises(ValueError, match=r"manifest.json is damaged: .*; take another checkpoint"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("meta", [5, [], "text", None])
def test_a_manifest_whose_meta_is_no_object_is_refused(tmp_path: Path, meta: Any) -> None:
    body = {"version": VERSION, "meta": meta, "files": []}
    (tmp_path / "manifest.json").write_text(manifest_text(body))
    with pytest.raises(ValueError, match="meta is no object"):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("sample_index", "all"),
        ("sample_index", None),
        ("model", "llama"),
        ("model", 5),
        ("precision", 16),
        ("optimizer", None),
    ],
)
def test_a_manifest_that_does_not_say_of_what_it_is_is_refused(
    tmp_path: Path, field: str, value: int | str | None
) -> None:
    full = Plan.of("tiny", gpu="local", gpus=1).resolve()
    meta = checkpoint_meta(full, 3) | {field: value}
    for read in (
        lambda: steps_done(tmp_path, meta, full),
        lambda: checkpoint_shape(tmp_path, meta),
    ):
        with pytest.raises(
            ValueError, match="its meta does not say sample_index, model, precision, optimizer"
        ):
            read()
    assert steps_done(tmp_path, checkpoint_meta(full, 3), full) == 3


BASES: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"finetune.seed": 5}, r"^finetune\.seed: is 5, .* set it to 0"),
    ({}, {"base": "aa"}, r"^finetune\.base: is 'weights of sha256 aa', .* 'null, drawn by seed 0'"),
    ({"base": "aa"}, {}, r"^finetune\.base: is 'null, drawn by seed 0', .* sha256 aa'"),
    ({"base": "aa"}, {"base": "bb"}, r"^finetune\.base: is 'weights of sha256 bb', .* sha256 aa'"),
    ({"base": "aa"}, {"base": "aa", "finetune.seed": 5}, ""),
    ({"finetune.method": "full"}, {"finetune.method": "full", "finetune.seed": 5}, ""),
]
FULL, FORM, LORA = "finetune.method", "finetune.quantize", "finetune.lora."
SETTINGS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {FULL: "full"}, r"^finetune\.method: is 'full', \S+ was written with 'lora'; set"),
    ({}, {FORM: {}}, r"^finetune\.quantize: is 'nf4', \S+ was written with null; set it to null"),
    ({FORM: {}}, {}, r"^finetune\.quantize\.format: is null, \S+ was written with 'nf4'; set"),
    (
        {FORM: {}},
        {FORM: {"double": False}},
        r"^finetune\.quantize\.double: is false, \S+ was written with true; set it to true",
    ),
    ({}, {"finetune.adapter": "b"}, r"^finetune\.adapter: is 'b', \S+ was written with 'default'"),
    ({}, {LORA + "initial": "a"}, r"^finetune\.lora\.initial: is 'a', \S+ was written with null"),
    (
        {LORA + "initial": "a", LORA + "initial_sha256": "aa"},
        {LORA + "initial": "a", LORA + "initial_sha256": "bb"},
        r"^finetune\.lora\.initial: is 'adapters of sha256 bb', .* with 'adapters of sha256 aa'",
    ),
    (
        {LORA + "initial": "a", LORA + "initial_sha256": "aa"},
        {LORA + "initial": "b", LORA + "initial_sha256": "aa"},
        "",
    ),
    ({LORA + "initial": "a", LORA + "initial_sha256": "aa"}, {}, ""),
]


@pytest.mark.parametrize(("theirs", "mine", "words"), [*BASES, *SETTINGS])
def test_adapters_go_on_beside_their_own_base_alone(
    tmp_path: Path, theirs: dict[str, Any], mine: dict[str, Any], words: str
) -> None:
    written, resuming = (_of_base(**{"finetune.method": "lora"} | each) for each in (theirs, mine))
    meta = checkpoint_meta(written, 3)
    if not words:
        assert steps_done(tmp_path, meta, resuming) == 3
        return
    with pytest.raises(PlanError, match=words) as refused:
        steps_done(tmp_path, meta, resuming)
    assert len(refused.value.problems) == 1 and "{" not in str(refused.value)


def test_adapters_do_not_go_on_from_a_checkpoint_of_training(tmp_path: Path) -> None:
    trained = Plan.of("tiny", gpu="local", gpus=1).resolve()
    with pytest.raises(PlanError, match=r"^checkpoint\.load: .* is of training, which has no ada"):
        steps_done(tmp_path, checkpoint_meta(trained, 3), _of_base(**{LORA + "rank": 8}))


def test_another_base_is_refused_before_a_rank_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checked_launch, "preflight", lambda plan, **more: [])
    (tmp_path / "a.gguf").write_bytes(b"gguf")
    (tmp_path / "text.txt").write_text("text " * 9999)
    start = {"finetune.base": str(tmp_path / "a.gguf"), "corpus.source": str(tmp_path / "text.txt")}
    made = Plan.of("tiny", set=start)
    written = checkpoint_meta(made.pin(), 3)
    written["finetune"]["base_sha256"] = "aa"
    body = {"version": VERSION, "meta": written, "files": []}
    (tmp_path / "manifest.json").write_text(manifest_text(body))
    going_on = made.replace(**{"checkpoint.load": str(tmp_path)})
    with pytest.raises(PlanError, match=r"^finetune\.base: is 'weights of sha256 \w+', \S+ was"):
        checked_launch.start(going_on, root=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def _of_base(base: str | None = None, **changes: Any) -> ResolvedPlan:
    """A plan that fine-tunes weights of the sha256 `base`, as if it had been pinned."""
    named = {"finetune.base": "a.gguf", "finetune.base_sha256": base} if base else {}
    return Plan.of("tiny", gpu="local", gpus=1, set=changes | named).resolve()


def test_a_manifest_whose_model_is_no_shape_is_told_by_its_first_fault(tmp_path: Path) -> None:
    meta = checkpoint_meta(Plan.of("tiny", gpu="local", gpus=1).resolve(), 3) | {
        "model": {"hidden": "wide"}
    }
    with pytest.raises(
        ValueError, match=r"has a damaged manifest: model\.layers: is missing \(and 4 more\)$"
    ):
        checkpoint_shape(tmp_path, meta)
