"""Real training through `accelerate launch`: what it computes, what it tells, what it saves, and
how it ends.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from workbench.corpora import tokenized_corpus
from workbench.engine.data.batch_sampler import BatchSampler
from workbench.interop.export import export
from workbench.models import Transformer
from workbench.models.weight_init import initial_value
from workbench.plan.learning_rate import learning_rate
from workbench.plan.schema import Plan
from workbench.plan.stage_replicas import data_share
from workbench.runs import Reader, Run, attach, start
from workbench.runs.launch.rendezvous_ports import free_port

pytestmark = pytest.mark.slow

STEPS, HALF = 6, 3
Records = list[dict[str, Any]]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the text; tokens are kept there too."""
    folder = tmp_path_factory.mktemp("training")
    (folder / "text.txt").write_text("".join(f"{n} squared is {n * n}. " for n in range(2000)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        yield folder


def plan(home: Path, strategy: str = "tensor-pipeline", gpus: int = 4, **changes: Any) -> Plan:
    written = {
        "training.steps": STEPS,
        "training.sequence_length": 32,
        "training.global_batch": 8,
        "training.micro_batch": 2,
        "training.evaluation.every": HALF,
        "training.optimizer.learning_rate": 1e-3,
        "training.seed": 7,
        "strategy.precision": "fp32",
        "checkpoint.every": HALF,
    } | {name.replace("__", "."): value for name, value in changes.items()}
    written["corpus.source"] = str(home / "text.txt")
    return Plan.of("tiny", gpu="local", gpus=gpus, strategy=strategy, set=written)


def finished(run: Run, phase: str = "finished") -> Records:
    state = run.wait(120)
    assert state.phase == phase, (state, run.log(0, 40))
    return Reader(run.dir).poll()


def losses(records: Records, rank: int = 0) -> list[float]:
    return [r["loss"] for r in records if r["kind"] == "step" and r["rank"] == rank]


def of(records: Records, kind: str, rank: int | None = None) -> Records:
    return [r for r in records if r["kind"] == kind and rank in (None, r["rank"])]


@pytest.fixture(scope="module")
def run(home: Path) -> Run:
    """Six steps on 2 tensor x 2 pipeline ranks."""
    started = start(plan(home, telemetry__trackers=["tensorboard"]), root=home / "runs")
    finished(started)
    return started


@pytest.fixture(scope="module")
def records(run: Run) -> Records:
    return Reader(run.dir).poll()


@pytest.fixture(scope="module")
def expected(home: Path) -> tuple[list[float], dict[int, float]]:
    """Losses of one process that trains plainly, and its losses on held-out text by step."""
    full = plan(home, "single", 1).resolve()
    t, o = full.training, full.training.optimizer
    text = BatchSampler(
        tokenized_corpus.load_corpus(full.corpus, full.shape.vocab),
        t.sequence_length,
        t.global_batch,
        data_share(t.global_batch, t.global_batch),
        t.seed,
    )
    model = Transformer(full.shape)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(initial_value(name, tuple(p.shape), full.shape.layers, t.seed, p.dtype))
    groups = [
        {"params": [p for p in model.parameters() if (p.ndim > 1) == matrix], "weight_decay": decay}
        for matrix, decay in ((True, o.weight_decay), (False, 0.0))
    ]
    optimizer = torch.optim.AdamW(groups, betas=(o.beta1, o.beta2), eps=o.epsilon)
    trained, held = [], {}
    for step in range(t.steps):
        tokens, targets, _ = text.batch(step)
        loss = model(tokens[0], targets[0]) / targets.numel()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), o.clip or 0.0)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, o, t.steps)
        optimizer.step()
        trained.append(loss.item())
        if (step + 1) % t.evaluation.every == 0:
            with torch.no_grad():
                batches = [text.evaluation(i) for i in range(t.evaluation.batches)]
                total = sum(model(x[0], y[0]).item() / y.numel() for x, y, _ in batches)
            held[step + 1] = total / len(batches)
    return trained, held


def test_losses_are_those_of_one_process(
    records: Records, expected: tuple[list[float], dict[int, float]]
) -> None:
    for rank in range(4):
        assert losses(records, rank) == pytest.approx(expected[0], rel=1e-5)
        found = {r["step"]: r["loss"] for r in of(records, "evaluation", rank)}
        assert found == pytest.approx(expected[1], rel=1e-5)


def test_every_rank_tells_where_it_stands(records: Records) -> None:
    hello = {r["rank"]: r for r in of(records, "hello")}
    assert {r["world_size"] for r in hello.values()} == {4}
    places = {tuple(sorted(r["coordinates"].items())) for r in hello.values()}
    assert len(places) == 4 and {r["stage"] for r in hello.values()} == {0, 1}
    assert all(r["backend"] == "gloo" and r["device"].startswith("cpu") for r in hello.values())
    assert {(r["rank"], r["step"]) for r in of(records, "bye")} == {
        (rank, STEPS) for rank in range(4)
    }


def test_the_first_two_steps_are_measured_on_every_rank(records: Records) -> None:
    for rank in range(4):
        assert [r["step"] for r in of(records, "memory", rank)] == [0, 1]
        for record in of(records, "memory", rank):
            sums: dict[bool, int] = {True: 0, False: 0}
            for row in record["rows"]:
                if row["moment"] == "peak":
                    sums[row["category"] == "allocated"] += row["bytes"]
            assert sums[True] > 2**20
            assert sums[False] == pytest.approx(sums[True], rel=0.03)
        (timed,) = of(records, "timeline", rank)
        spans = timed["rows"]
        assert timed["step"] == 2  # memory is sampled on others
        assert {"F", "B", "P2P", "OPTIMIZER"} <= {row["action"] for row in spans}
        assert all(0 <= row["start"] <= row["end"] for row in spans)
        calls = of(records, "collectives", rank)[1]["rows"]
        assert {row["axis"] for row in calls} == {"tensor", "pipeline", "world"}
        assert all(row["group_size"] == (4 if row["axis"] == "world" else 2) for row in calls)
        (calls,) = (r["rows"] for r in of(records, "collectives", rank) if r["step"] == 2)
        assert all(row["seconds"] > 0 for row in calls)


def test_stages_of_unequal_replicas_train_as_one_process(
    home: Path, run: Run, expected: tuple[list[float], dict[int, float]]
) -> None:
    """Two replicas of the first stage, one of the second; the second half goes on from a run on
    other ranks.
    """
    replicas = {"strategy.pipeline.size": 2, "strategy.pipeline.replicas": [2, 1]}
    unequal = plan(home, "dapple", 3, training__micro_batch=4, **replicas)
    whole = finished(start(unequal, root=home / "runs"))
    for rank in range(3):
        assert losses(whole, rank) == pytest.approx(expected[0], rel=1e-5)
        found = {r["step"]: r["loss"] for r in of(whole, "evaluation", rank)}
        assert found == pytest.approx(expected[1], rel=1e-5)
    assert [r["coordinates"]["data"] for r in of(whole, "hello")] == [0, 1, 0]
    half = finished(start(unequal, root=home / "runs", resume=checkpoints(run)[0]))
    assert losses(half) == pytest.approx(expected[0][HALF:], rel=1e-5)


def test_replicas_in_turn_train_as_one_process(
    home: Path, run: Run, expected: tuple[list[float], dict[int, float]]
) -> None:
    """Two replicas of the first stage take whole microbatches of two sequences; the second half
    goes on from a run on other ranks.
    """
    replicas = {"strategy.pipeline.size": 2, "strategy.pipeline.replicas": [2, 1]}
    replicas |= {"strategy.pipeline.distribution": "round_robin"}
    turns = plan(home, "dapple", 3, **replicas)
    whole = finished(start(turns, root=home / "runs"))
    for rank in range(3):
        assert losses(whole, rank) == pytest.approx(expected[0], rel=1e-5)
        found = {r["step"]: r["loss"] for r in of(whole, "evaluation", rank)}
        assert found == pytest.approx(expected[1], rel=1e-5)
    assert [r["stage"] for r in of(whole, "hello")] == [0, 0, 1]
    for rank, microbatches in enumerate(([0, 2], [1, 3], [0, 1, 2, 3])):
        (timeline,) = (r["rows"] for r in of(whole, "timeline", rank) if r["step"] == 2)
        assert [r["microbatch"] for r in timeline if r["action"] == "F"] == microbatches
    half = finished(start(turns, root=home / "runs", resume=checkpoints(run)[0]))
    assert losses(half) == pytest.approx(expected[0][HALF:], rel=1e-5)


def test_the_profile_shows_them(run: Run, expected: tuple[list[float], dict[int, float]]) -> None:
    profile = run.profile()
    assert profile.source == "measured" and set(profile.peak_bytes_by_rank) == set(range(4))
    assert profile.loss == pytest.approx(expected[0], rel=1e-5)
    used = [seconds for (seconds,) in profile.rows("steps", "cpu_seconds")]
    assert len(used) == 4 * len(profile.loss) and min(used) > 0
    assert profile.cpu_seconds is not None and profile.cpu_seconds > 4 * min(used)
    waited = list(profile.rows("steps", "data_seconds", "seconds"))
    assert len(waited) == len(used) and all(0 < data < whole for data, whole in waited)
    assert profile.data_share is not None and 0 < profile.data_share < 1


def test_tensorboard_has_its_file(run: Run) -> None:
    assert list(run.dir.rglob("events.out.tfevents.*"))


def digests(checkpoint: Path) -> dict[str, str]:
    files = json.loads((checkpoint / "manifest.json").read_text())["files"]
    return {entry["file"]: entry["sha256"] for entry in files}


def checkpoints(run: Run) -> list[Path]:
    return sorted((run.dir / "checkpoints").iterdir())


def test_a_resumed_run_is_the_same_to_the_bit(home: Path, run: Run, records: Records) -> None:
    half, end = checkpoints(run)
    assert (half.name, end.name) == ("step-00000003", "step-00000006")
    resumed = start(run.plan, root=home / "runs", resume=half)
    again = finished(resumed)
    assert losses(again) == losses(records)[HALF:]
    assert digests(checkpoints(resumed)[-1]) == digests(end)


def test_another_plan_goes_on_from_it(
    home: Path, run: Run, expected: tuple[list[float], dict[int, float]]
) -> None:
    resumed = start(plan(home, "single", 1), root=home / "runs", resume=checkpoints(run)[0])
    again = finished(resumed)
    assert losses(again) == pytest.approx(expected[0][HALF:], rel=1e-5)
    assert [r["step"] for r in of(again, "step")] == list(range(HALF, STEPS))


def test_bf16_learns_and_a_stop_leaves_a_checkpoint(home: Path) -> None:
    changes = {"strategy__precision": "bf16", "training__steps": 100000, "checkpoint__every": 0}
    running = start(
        plan(home, "ddp", 2, training__evaluation__every=0, **changes), root=home / "runs"
    )
    seen: list[Any] = []
    reader = Reader(running.dir)
    deadline = time.monotonic() + 90
    while len(losses(seen)) < 30 and time.monotonic() < deadline and not running.state.final:
        seen += reader.poll()
        time.sleep(0.1)
    running.stop(checkpoint=True)
    seen = finished(running, "stopped")
    found = losses(seen)
    assert len(found) >= 30 and sum(found[-5:]) / 5 < found[0] - 1.0
    steps = {r["rank"]: r["step"] for r in of(seen, "bye")}
    assert steps == {0: len(found), 1: len(found)}
    assert [path.name for path in checkpoints(running)] == [f"step-{len(found):08d}"]
    assert running.state.exit_code == 0


def test_a_launcher_of_too_few_ranks_is_refused(home: Path, tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text(plan(home, "ddp", 2).pin().to_yaml())
    command = [sys.executable, "-m", "workbench.engine.worker", str(tmp_path / "plan.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90)
    assert done.returncode == 1
    error = json.loads((tmp_path / "errors" / "rank00000.json").read_text())
    assert error["message"] == "cluster.gpus is 2, but the launcher started 1 ranks"
    assert (error["type"], error["step"]) == ("RuntimeError", None)
    assert error["action"] == "joining the process group"
    assert not of(Reader(tmp_path).poll(), "step")


def test_an_exported_plan_runs_by_its_own_script(
    home: Path, tmp_path: Path, expected: tuple[list[float], dict[int, float]]
) -> None:
    export(
        plan(home, "dapple", 2, training__steps=STEPS, checkpoint__every=0),
        tmp_path / "exported plan",
    )
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    here = str(Path(__file__).parents[2])
    environment = {**os.environ, "PATH": path, "PYTHONPATH": here, "MAIN_PORT": str(free_port())}
    script = tmp_path / "exported plan" / "launch.sh"
    done = subprocess.run(
        [script], cwd="/", env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    run = attach(tmp_path / "exported plan")
    assert (run.state.phase, run.state.exit_code, run.state.launched_elsewhere) == (
        "finished",
        0,
        True,
    )
    assert (run.dir / "command.json").exists() and run.profile().loss
    records = Reader(tmp_path / "exported plan").poll()
    assert {(r["rank"], r["world_size"]) for r in of(records, "hello")} == {(0, 2), (1, 2)}
    assert losses(records, 1) == pytest.approx(expected[0], rel=1e-5)
