"""What the commands of the exports share: arguments, progress and the answer, lines of JSON."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from workbench.engine.exit_codes import exit_status


def export_parser(module: str) -> argparse.ArgumentParser:
    """A parser of CHECKPOINT, --to and --base, of `python -m workbench.engine.export.MODULE`."""
    parser = argparse.ArgumentParser(prog=f"python -m workbench.engine.export.{module}")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--base", type=Path)
    return parser


def as_json(done: int, of: int, what: str) -> None:
    """Print progress as a line of JSON."""
    print(json.dumps({"done": done, "of": of, "what": what}), flush=True)


def answered(work: Callable[[], dict[str, Any]]) -> int:
    """Print the answer of `work`, on one thread; exit status 2 where it is refused."""
    torch.set_num_threads(1)
    return exit_status(lambda: print(json.dumps(work()), flush=True))
