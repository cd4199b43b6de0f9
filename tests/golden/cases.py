"""The command lines whose answers are recorded, and how each answer is compared.

Paths are relative to the repository, where the commands run; `ROOT` stands for a fresh folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
PLANS = sorted(path.stem for path in (HERE / "plans").glob("*.yaml"))
RUN = "20261122-175126-small"
"""A finished run of two ranks with two checkpoints, written by version 0.1.0; its paths are made
neutral.
"""

REHEARSED = ("tiny-tensor-pipeline", "tiny-zero-3", "tiny-experts")
"""Small enough for a rehearsal in a test."""
SEARCHED = ("tiny-experts", "llama-3-8b-zero-3", "llama-3-70b-3d", "gpt2-xl-gpipe")
SHARDED = ("llama-3-8b-zero-3", "tiny-grid", "pangu-200b-5d", "gpt2-xl-gpipe")
"""Whose operators are placed."""
FORMATS = ("deepspeed", "megatron", "torchtitan", "fsdp")
LOCAL = ("--model", "tiny", "--gpu", "local", "--gpus", "2", "--strategy", "ddp")


class Case(NamedTuple):
    """A command line, and whether its values are recorded or, where they are of this machine, only
    their types.
    """

    name: str
    words: tuple[str, ...]
    exact: bool = True


def _file(plan: str) -> str:
    return f"tests/golden/plans/{plan}.yaml"


def cases() -> list[Case]:
    """All cases; a name is verb/plan, and the file that its answer is recorded in."""
    found = [Case(f"{verb}/all", (verb,)) for verb in ("models", "strategies")]
    found += [Case(f"{verb}/all", (verb,), exact=False) for verb in ("gpus", "kernels", "doctor")]
    for plan in PLANS:
        found += [
            Case(f"{verb}/{plan}", (verb, _file(plan), *more))
            for verb, *more in (("plan", "--complete"), ("estimate",), ("explain",))
        ]
        found += [
            Case(f"translate/{plan}-{to}", ("translate", _file(plan), "--as", to)) for to in FORMATS
        ]
        found.append(Case(f"export/{plan}", ("export", _file(plan), "--to", "ROOT/exported")))
    found += [Case(f"rehearse/{plan}", ("rehearse", _file(plan))) for plan in REHEARSED]
    found += [Case(f"search/{plan}", ("search", _file(plan), "--top", "3")) for plan in SEARCHED]
    found += [
        Case(f"operators/{plan}", ("operators", _file(plan), "--sequences", "2"))
        for plan in SHARDED
    ]
    found += [
        Case(
            "import/deepspeed",
            (
                "import",
                "tests/golden/foreign/ds_config.json",
                "--model",
                "llama-3-8b",
                "--gpu",
                "a100-sxm-80gb",
                "--gpus",
                "16",
            ),
        ),
        Case(
            "import/megatron",
            ("import", "tests/golden/foreign/pretrain.sh", "--gpu", "h100-sxm-80gb"),
        ),
        Case(
            "import/torchtitan",
            ("import", "tests/golden/foreign/job.toml", "--gpu", "h100-sxm-80gb", "--gpus", "64"),
        ),
        Case(
            "import/fsdp",
            (
                "import",
                "tests/golden/foreign/fsdp.yaml",
                "--model",
                "llama-2-7b",
                "--gpu",
                "a100-sxm-80gb",
            ),
        ),
        Case("validate/rows", ("validate", "tests/golden/rows.csv")),
        Case(
            "compare/plans", ("compare", _file("tiny-ddp"), _file("tiny-single"), "--no-rehearse")
        ),
        Case("compare/run", ("compare", f"ROOT/runs/{RUN}", "--no-rehearse"), exact=False),
        Case("attach/run", ("attach", f"ROOT/runs/{RUN}", "--once")),
        Case("runs/run", ("runs", "--root", "ROOT/runs")),
        Case("weights/run", ("weights", f"ROOT/runs/{RUN}", "--to", "ROOT/weights")),
        Case("verify/tiny-ddp", ("verify", _file("tiny-ddp")), exact=False),
        Case(
            "run/tiny",
            (
                "run",
                *LOCAL,
                "--set",
                "training.steps=2",
                "--set",
                "training.sequence_length=32",
                "--set",
                "corpus=tests/golden/corpus.txt",
                "--root",
                "ROOT/started",
                "--wait",
            ),
            exact=False,
        ),
    ]
    return found


TINY = ("--model", "tiny", "--gpu", "h100-sxm-80gb", "--gpus", "4")
REFUSED: tuple[tuple[str, ...], ...] = (
    ("estimate",),
    ("plan", "nowhere.yaml"),
    ("plan", *TINY, "--strategy", "dappel"),
    ("plan", *TINY, "--set", "training.step=3"),
    ("plan", *TINY, "--set", "steps"),
    ("estimate", *TINY, "--strategy", "ddp", "--set", "strategy.tensor.size=8"),
    (
        "estimate",
        "--model",
        "llama-9",
        "--gpu",
        "h100-sxm-80gb",
        "--gpus",
        "8",
        "--strategy",
        "ddp",
    ),
    ("estimate", "--model", "tiny", "--gpu", "h1000", "--gpus", "8", "--strategy", "ddp"),
    ("rehearse", *TINY, "--strategy", "ddp", "--ranks", "0,9"),
    ("verify", *TINY, "--precision", "fp8"),
    ("search", *TINY, "--where", "nothing<1"),
    ("translate", *TINY, "--strategy", "ddp", "--as", "jax"),
    ("import", "nowhere.json"),
    ("attach", "no-such-run"),
    ("stop", "no-such-run"),
    ("validate", "nowhere.csv"),
    ("compare", "nowhere"),
    ("weights", "nowhere", "--to", "ROOT/weights"),
    ("estimate", "--no-such-option"),
    ("no-such-verb",),
)
"""Command lines that are refused; what is recorded is the exit code and the fields that are named.
"""
