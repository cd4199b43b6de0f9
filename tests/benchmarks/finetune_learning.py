"""How much of full fine-tuning's gain LoRA keeps: `python -m tests.benchmarks.finetune_learning
[--models trained BASE.gguf] [--methods sft dpo] [--ranks 8 32] [--results FILE] [--at-once N]`.

Chats and preference pairs are made of the standard library's docstrings, the last modules held out;
a model of 10M parameters is trained on the library's text first, whose last tenth it does not see.
Each method fine-tunes it on equal tokens in fp32, at the best of three learning rates by the
held-out loss (on the first seed; others use it too), and a `gain` is by how much that falls from
the base's, as a share. Each is trained on one rank by the loop of `workbench run`, on a GPU where
there is one (minutes; hours on a CPU), and appended to the results file as it ends; the command
goes on from there. Prints a JSON line a model, method and rank.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Iterable
from datetime import date
from functools import partial
from importlib.metadata import version
from itertools import chain, product
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple, cast

import torch
from accelerate import Accelerator

import workbench as wb
from workbench.engine.loop import TrainingLoop
from workbench.engine.measure.telemetry_writer import TelemetryWriter
from workbench.engine.verify.forked_ranks import run_worlds
from workbench.machine.attached import attached
from workbench.parallel.mesh import build_mesh
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.runs.run import Run

TRAINED = "trained"
METHODS = "full", "lora"
LEARNED = ["sft", "dpo"]
SHAPE = {"layers": 6, "hidden": 384, "heads": 6, "ffn": 1024, "vocab": 257}
RATES: dict[tuple[bool, str], dict[str, tuple[float, ...]]] = {
    (True, "sft"): {"full": (3e-4, 1e-3, 3e-3), "lora": (1e-3, 3e-3, 1e-2)},
    (True, "dpo"): {"full": (3e-5, 1e-4, 3e-4), "lora": (3e-4, 1e-3, 3e-3)},
    (False, "sft"): {"full": (3e-5, 1e-4, 3e-4), "lora": (3e-4, 1e-3, 3e-3)},
    (False, "dpo"): {"full": (1e-5, 3e-5, 1e-4), "lora": (3e-4, 1e-3, 3e-3)},
}
"""(whether it is the small model, what is learned) -> learning rates that are tried."""
HELD_OUT = 16
"""Batches of an evaluation."""
BASELINE = 1e-12
"""Learning rate of a run that changes nothing, whose held-out loss is the base's."""
DEADLINE = 3600.0
Row = dict[str, Any]


def pretrained(folder: Path, steps: int) -> Path:
    """The checkpoint of the small model, trained on text if it is not there yet."""
    plan = wb.Plan.model_validate(
        {
            "model": SHAPE,
            "cluster": {"gpu": "local", "gpus": 1},
            "strategy": {"precision": "fp32"},
            "training": {
                "sequence_length": 256,
                "global_batch": 64,
                "micro_batch": 64,
                "steps": steps,
                "optimizer": {"learning_rate": 2e-3, "warmup_steps": steps // 20},
            },
            "corpus": {"source": "stdlib", "tokenizer": "bytes", "holdout": 0.1},
            "checkpoint": {"every": steps},
        }
    )
    for run in wb.runs(folder):
        if run.state.phase == "finished" and (found := _checkpoint(run, steps)).exists():
            return found
    run = wb.run(plan, wait=True, root=folder)
    assert run.state.phase == "finished", run
    return _checkpoint(run, steps)


def _checkpoint(run: Run, steps: int) -> Path:
    return run.dir / "checkpoints" / f"step-{steps:08d}"


def plan_of(row: Row, base: str) -> wb.Plan:
    """The plan of one fine-tuning."""
    small, dpo = row["model"] == TRAINED, row["learning"] == "dpo"
    tokenizer = "bytes" if small else base
    steps = 1 if row["rate"] == BASELINE else row["steps"]
    optimizer = {"learning_rate": row["rate"], "warmup_steps": min(10, steps - 1)}
    optimizer |= {"weight_decay": 0.0}
    return wb.Plan.model_validate(
        {
            "model": SHAPE if small else base,
            "cluster": {"gpu": "local", "gpus": 1},
            "strategy": {"precision": "fp32"},
            "finetune": {
                "sequence_length": row["sequence_length"],
                "global_batch": row["global_batch"],
                "micro_batch": row["global_batch"],
                "steps": steps,
                "method": row["method"],
                **({"lora": {"rank": row["rank"]}} if row["method"] == "lora" else {}),
                **({"preference": {"beta": 0.1}} if dpo else {}),
                "base": base,
                "seed": row["seed"],
                "optimizer": optimizer,
                "evaluation": {"every": steps, "batches": HELD_OUT},
            },
            "corpus": {
                "source": "stdlib",
                "format": "preferences" if dpo else "messages",
                "tokenizer": tokenizer,
            },
        }
    )


class Records:
    """Records of a run, in place of those in its directory."""

    def __init__(self) -> None:
        self.of: dict[str, list[Row]] = {}

    def record(self, kind: str, **fields: Any) -> None:
        """Take one."""
        self.of.setdefault(kind, []).append(fields)


def trained(rank: int, plan: ResolvedPlan) -> Row:
    """Held-out loss, and tokens that had loss, of a plan that is run."""
    records = Records()
    with tempfile.TemporaryDirectory() as folder:
        telemetry = cast(TelemetryWriter, records)
        device = torch.device("cpu") if plan.gpu.device == "cpu" else torch.device("cuda", 0)
        os.environ["ACCELERATE_TORCH_DEVICE"] = str(device)
        accelerator = Accelerator(cpu=device.type == "cpu")
        mesh = build_mesh(plan, rank, accelerator.device)
        TrainingLoop(plan, Path(folder), mesh, accelerator, telemetry).run()
    held_out = records.of["evaluation"][-1]
    del held_out["step"]
    answers = sum(step["trained_tokens"] for step in records.of["step"])
    return {"held_out": held_out, "answer_tokens": answers}


class Results:
    """Rows of a file, and what is measured when it is asked for.

    Args:
        file: JSON lines.
        bases: Model -> the base's path.
        at_once: Runs at a time.
    """

    def __init__(self, file: Path, bases: dict[str, str], at_once: int) -> None:
        self.file, self.bases, self.at_once = file, bases, at_once
        lines = file.read_text().splitlines() if file.exists() else []
        self.rows: list[Row] = list(map(json.loads, lines))

    def losses(self, asked: Iterable[Row]) -> list[float]:
        """Held-out loss of each row."""
        asked = list(asked)
        missing = [row for i, row in enumerate(asked) if row not in asked[:i]]
        missing = [row for row in missing if not self._known(row)]
        while missing:
            batch, missing = missing[: self.at_once], missing[self.at_once :]
            plans = [plan_of(row, self.bases[row["model"]]).resolve() for row in batch]
            worlds = [(1, partial(trained, plan=plan)) for plan in plans]
            for row, (found,) in zip(batch, run_worlds(worlds, DEADLINE), strict=True):
                self.rows.append({**row, **found})
                with self.file.open("a") as file:
                    file.write(json.dumps(self.rows[-1]) + "\n")
        return [self._known(row)[0]["held_out"]["loss"] for row in asked]

    def _known(self, row: Row) -> list[Row]:
        return [one for one in self.rows if row.items() <= one.items()]


class Size(NamedTuple):
    """What every method learns from."""

    sequence_length: int
    global_batch: int
    steps: int


class Comparison(NamedTuple):
    """What is learned, by which model, with adapters of which rank."""

    model: str
    learning: str
    rank: int
    size: Size

    def tried(self, method: str) -> list[Row]:
        """Rows of a method's learning rates, on the first seed."""
        rank = {"rank": self.rank} if method == "lora" else {}
        one = {"model": self.model, "learning": self.learning, "method": method, "seed": 0, **rank}
        rates = RATES[self.model == TRAINED, self.learning][method]
        return [{**one, **self.size._asdict(), "rate": rate} for rate in rates]

    def base(self) -> Row:
        """The row of a run that changes nothing."""
        return {**self.tried("full")[0], "rate": BASELINE}

    def best(self, method: str, results: Results, seeds: int) -> list[Row]:
        """Rows of all seeds at the rate whose held-out loss is lowest on the first."""
        tried = self.tried(method)
        losses = results.losses(tried)
        best = tried[losses.index(min(losses))]
        return [{**best, "seed": seed} for seed in range(seeds if self.model == TRAINED else 1)]

    def answer(self, results: Results, seeds: int) -> Row:
        """Gains of both methods, each at its best learning rate."""
        (base,) = results.losses([self.base()])
        best = {method: self.best(method, results, seeds) for method in METHODS}
        losses = {method: results.losses(rows) for method, rows in best.items()}
        gains = {method: [1 - loss / base for loss in found] for method, found in losses.items()}
        kept = [low / full for low, full in zip(gains["lora"], gains["full"], strict=True)]
        return {
            **self._asdict(),
            "size": self.size._asdict(),
            "model": self.model if self.model == TRAINED else Path(self.model).name,
            "base_loss": base,
            "rates": {method: rows[0]["rate"] for method, rows in best.items()},
            "gains": gains,
            "lora_keeps": kept,
            "lora_keeps_mean": mean(gains["lora"]) / mean(gains["full"]),
            "source": "measured",
            "device": attached().name,
            "date": date.today().isoformat(),
            "torch": version("torch"),
        }


def main() -> None:
    """Measure what is not yet measured, compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=[TRAINED], help="trained, or a base's path")
    parser.add_argument("--methods", nargs="+", choices=LEARNED, default=LEARNED)
    parser.add_argument("--ranks", nargs="+", type=int, default=[8], help="of adapters")
    parser.add_argument("--seeds", type=int, default=3, help="of the small model; else one")
    parser.add_argument("--pretraining", type=int, default=1500, help="steps of the small model")
    parser.add_argument("--sequence-length", type=int, default=256)
    parser.add_argument("--global-batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=120, help="of every fine-tuning")
    parser.add_argument("--results", type=Path, default=Path("finetune-learning.jsonl"))
    parser.add_argument("--runs", type=Path, default=Path("finetune-learning-runs"))
    parser.add_argument("--at-once", type=int, default=1)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    bases = {model: model for model in asked.models if model != TRAINED}
    if TRAINED in asked.models:
        bases[TRAINED] = str(pretrained(asked.runs / "base", asked.pretraining).resolve())
    results = Results(asked.results, bases, asked.at_once)
    size = Size(asked.sequence_length, asked.global_batch, asked.steps)
    every = product(asked.models, asked.methods, asked.ranks)
    compared = [Comparison(*one, size) for one in every]
    results.losses(one.base() for one in compared)
    # What runs at once is alike: first all learning rates, then all seeds at the best.
    results.losses(chain.from_iterable(one.tried(m) for one in compared for m in METHODS))
    results.losses(
        chain.from_iterable(one.best(m, results, asked.seeds) for one in compared for m in METHODS)
    )
    for one in compared:
        print(json.dumps(one.answer(results, asked.seeds)), flush=True)


if __name__ == "__main__":
    main()
