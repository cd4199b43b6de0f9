"""Frameworks that read what is translated, each in folders of its own below `.pytest_cache`: their
wheels are unpacked there, and found by PYTHONPATH, so that the environment of the tests stays as it
is.
"""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
CACHE = HERE.parents[2] / ".pytest_cache" / "consumers"
SHARED = (
    "tyro",
    "docstring-parser",
    "typeguard",
    "tomli",
    "einops",
    "torchdata",
    "spmd_types==0.2.3",
    "torch_checkpointing",
    "hjson",
    "py-cpuinfo",
    "msgpack",
)
"""What the frameworks import beside themselves and torch."""
DOWNLOAD = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-build-isolation")


def unpacked(name: str, packages: Sequence[str], *options: str) -> Path:
    """The folder of `packages`, filled where it is not yet. Skips the test where pip cannot."""
    folder = CACHE / name
    if folder.is_dir():
        return folder
    draft = CACHE / f".{name}-{os.getpid()}"
    draft.mkdir(parents=True, exist_ok=True)
    got = subprocess.run(
        [*DOWNLOAD, *options, "--dest", str(draft), *packages],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "DS_BUILD_OPS": "0"},
    )
    if got.returncode:
        shutil.rmtree(draft)
        pytest.skip(f"pip cannot download {', '.join(packages)}: {got.stderr[-300:]}")
    for archive in list(draft.iterdir()):
        if archive.suffix == ".whl":
            with zipfile.ZipFile(archive) as whole:
                whole.extractall(draft)
        else:
            with tarfile.open(archive) as whole:
                whole.extractall(draft, filter="data")
            inner = draft / archive.name.removesuffix(".tar.gz")
            for part in inner.iterdir():
                if part.is_dir() and (part / "__init__.py").exists():
                    part.rename(draft / part.name)
        archive.unlink()
    draft.rename(folder)
    return folder


def answers(driver: str, folders: Sequence[Path], jobs: Sequence[Any]) -> dict[str, str]:
    """Name of each of `jobs` -> why the framework refuses it, "" where it accepts."""
    root = HERE.parents[2]
    got = subprocess.run(
        [sys.executable, str(HERE / f"{driver}.py")],
        input=json.dumps(list(jobs)),
        capture_output=True,
        text=True,
        timeout=300,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, [*folders, root])),
            "OMP_NUM_THREADS": "1",
            "PYTHONSAFEPATH": "1",
        },
    )
    assert got.returncode == 0, got.stderr[-2000:]
    found: dict[str, str] = json.loads(got.stdout.splitlines()[-1])
    return found
