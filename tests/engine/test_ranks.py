"""The whole loop on several ranks, text to checkpoint: the same losses as one process, and exact
resumption.
"""

from __future__ import annotations

import json
import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest
from accelerate.state import AcceleratorState

from workbench.engine.worker_lifecycle import train
from workbench.plan.schema import Plan
from workbench.runs import Reader
from workbench.runs.launch.rendezvous_ports import free_port

STEPS, HALF = 6, 3
Losses = tuple[dict[int, float], dict[int, float]]
"""Training loss and held-out loss, by step."""


def plan(text: Path, mesh: tuple[int, int, int], **changes: Any) -> Plan:
    tensor, pipeline, data = mesh
    written = {
        "strategy.tensor.size": tensor,
        "strategy.pipeline.size": pipeline,
        "strategy.data.bucket_mib": 0.1,
        "corpus.source": str(text),
        "training.sequence_length": 16,
        "training.global_batch": 8,
        "training.steps": STEPS,
        "training.optimizer.learning_rate": 1e-3,
        "training.optimizer.warmup_steps": 2,
        "training.seed": 7,
        "training.evaluation.every": HALF,
        "checkpoint.every": HALF,
        "strategy.precision": "fp32",
    } | {name.replace("__", "."): value for name, value in changes.items()}
    return Plan.of("tiny", gpu="local", gpus=tensor * pipeline * data, strategy="ddp", set=written)


def run(folder: Path, made: Plan) -> list[Losses]:
    """What every rank tells of a run in `folder`, each in a forked process that joins as a launched
    one does.
    """
    folder.mkdir()
    (folder / "plan.yaml").write_text(made.pin().to_yaml())
    context, port = multiprocessing.get_context("fork"), str(free_port())
    ranks = [
        context.Process(target=_rank, args=(folder, rank, made.world_size, port))
        for rank in range(made.world_size)
    ]
    try:
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(100)
        assert [process.exitcode for process in ranks] == [0] * len(ranks)
    finally:
        for process in ranks:
            process.kill()
    records = Reader(folder).poll()
    return [
        (_losses(records, "step", rank), _losses(records, "evaluation", rank))
        for rank in range(made.world_size)
    ]


def _rank(folder: Path, rank: int, world_size: int, port: str) -> None:
    AcceleratorState._reset_state(
        reset_partial_state=True
    )  # what another test has joined, here, is not this rank's
    if world_size > 1:
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "ACCELERATE_USE_CPU": "true",
        }
    os._exit(train(folder / "plan.yaml"))


def _losses(records: list[dict[str, Any]], kind: str, rank: int) -> dict[int, float]:
    return {r["step"]: r["loss"] for r in records if (r["kind"], r["rank"]) == (kind, rank)}


def digests(folder: Path) -> dict[str, str]:
    files = json.loads(
        (folder / "checkpoints" / f"step-{STEPS:08d}" / "manifest.json").read_text()
    )["files"]
    return {entry["file"]: entry["sha256"] for entry in files}


@pytest.mark.parametrize(
    "mesh",
    [(1, 1, 2), pytest.param((1, 2, 2), marks=pytest.mark.slow)],
    ids=["data", "pipeline x data"],
)
def test_data_ranks_read_and_lose_what_one_process_does(
    tmp_path: Path, text: Path, mesh: tuple[int, int, int]
) -> None:
    ((trained, held),) = run(tmp_path / "one", plan(text, (1, 1, 1)))
    assert len(trained) == STEPS and len(held) == STEPS // HALF
    for many, held_by_many in run(tmp_path / "many", plan(text, mesh)):
        assert many == pytest.approx(trained, rel=1e-6)
        assert held_by_many == pytest.approx(held, rel=1e-6)


def test_sharded_states_resume_to_the_bit(tmp_path: Path, text: Path) -> None:
    made = plan(
        text, (1, 1, 2), strategy__data__zero=3, checkpoint__every=1, training__evaluation__every=0
    )
    whole = run(tmp_path / "whole", made.replace(**{"checkpoint.keep": STEPS}))
    half = str(tmp_path / "whole" / "checkpoints" / f"step-{HALF:08d}")
    rest = run(tmp_path / "rest", made.replace(**{"checkpoint.load": half}))
    for (trained, _), (again, _) in zip(whole, rest, strict=True):
        assert again == {step: loss for step, loss in trained.items() if step >= HALF}
    assert digests(tmp_path / "rest") == digests(tmp_path / "whole")
    assert len(digests(tmp_path / "whole")) == 2


@pytest.mark.slow
def test_16_bits_resume_to_the_bit_on_every_axis(tmp_path: Path, text: Path) -> None:
    eight = plan(text, (2, 2, 2), strategy__precision="bf16")
    whole = run(tmp_path / "whole", eight)
    half = str(tmp_path / "whole" / "checkpoints" / f"step-{HALF:08d}")
    rest = run(tmp_path / "rest", eight.replace(**{"checkpoint.load": half}))
    for (trained, held), (again, held_again) in zip(whole, rest, strict=True):
        assert again == {step: loss for step, loss in trained.items() if step >= HALF}
        assert held_again == {STEPS: held[STEPS]}
    assert digests(tmp_path / "rest") == digests(tmp_path / "whole")
    # Another mesh goes on from the same state; only 16-bit rounding in another order may tell them
    # apart.
    for trained, _ in run(
        tmp_path / "other", plan(text, (1, 1, 2), strategy__precision="bf16", checkpoint__load=half)
    ):
        assert trained == pytest.approx(
            {step: whole[0][0][step] for step in range(HALF, STEPS)}, rel=2e-3
        )
