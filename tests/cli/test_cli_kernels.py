"""`workbench kernels`: every operator, what it takes of a GPU, and how fast it was measured,
without torch.
"""

import json
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Ask
from workbench import data_files
from workbench.cli.commands import kernels

TABLE = json.loads((data_files.assets() / "data/kernels.json").read_text())
NAMES = [kernel["name"] for kernel in TABLE["kernels"]]


def row(
    direction: str, shape: Any, eager: float, fused: float, share: Any, liger: Any = None
) -> dict[str, Any]:
    seconds = {"eager": eager, "compiled": 2 * fused, "fused": fused, "liger": liger}
    own = {
        "kernel": "add_norm",
        "case": "rmsnorm",
        "shape": shape,
        "dtype": "bfloat16",
        "pass": direction,
    }
    return {**own, "seconds": seconds, "share_of_copy": share}


BENCH = {
    "device": "NVIDIA H200",
    "kind": "cuda",
    "date": "2026-01-02",
    "versions": {"torch": "2.13"},
    "kernels": [
        row("forward", [64, 1024], 1.0, 1.0, 0.2),
        row("forward", [64, 8192], 6.0, 1.0, 0.95, liger=1.5),
        row("backward", [64, 8192], 3.0, 2.0, 0.91, liger=3.0),
    ],
    "linear_cross_entropy": [
        {
            "kernel": "linear_cross_entropy",
            "shape": [8, 4, 128],
            "dtype": "bfloat16",
            "pass": "step",
            "seconds": {"eager": 2.0, "compiled_chunked": 1.0, "fused": 1.0, "liger": None},
        }
    ],
}


@pytest.fixture
def listed(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """The command, where these benchmarks are all that there are."""

    def run(*words: str, benchmarks: tuple[Any, ...] = ()) -> tuple[int, str, str]:
        monkeypatch.setattr(kernels, "kernel_benchmarks", lambda: benchmarks)
        return ask("kernels", *words)

    return run


def test_every_kernel_is_shown_with_where_it_runs(listed: Callable[..., Any]) -> None:
    code, out, _ = listed()
    assert code == 0 and all(name in out for name in NAMES)
    assert out.count("not measured") == len(NAMES) and " residual_norm.reference " in out
    assert f"Triton {TABLE['triton']}" in out and all(
        out.count(f"sm_{sm} ") == len(NAMES) for sm in (80, 90, 100)
    )
    assert "NO" not in out and "Measured" not in out


def test_machines_get_facts_and_the_worst_of_all_cases(listed: Callable[..., Any]) -> None:
    found = json.loads(listed("--json")[1])
    assert found["triton"] == TABLE["triton"] and [one["name"] for one in found["kernels"]] == NAMES
    for one, fact in zip(found["kernels"], TABLE["kernels"], strict=True):
        assert {key: one[key] for key in fact} == fact and one["measured"] == []
        for worst in one["ahead"]:
            own = [
                r for r in TABLE["ahead"] if (r["kernel"], r["sm"]) == (one["name"], worst["sm"])
            ]
            assert worst["cases"] == len(own) > 0 and worst["vectorised"] is True
            assert worst["registers"] == max(r["registers"] for r in own) and worst["spills"] == 0


def test_a_kernel_that_loads_narrowly_is_shown(
    listed: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    table = {**TABLE, "ahead": [dict(r, vector_stores=0) for r in TABLE["ahead"]]}
    monkeypatch.setattr(kernels, "read_kernel_table", lambda: table)
    found = {
        one["name"]: one["ahead"][0]["vectorised"]
        for one in json.loads(listed("--json")[1])["kernels"]
    }
    assert found["add_norm"] is False and "NO" in listed()[1]


def test_what_was_measured_is_the_largest_shape_all_passes_together(
    listed: Callable[..., Any],
) -> None:
    found = {
        one["name"]: one["measured"]
        for one in json.loads(listed("--json", benchmarks=(BENCH,))[1])["kernels"]
    }
    (norm,), (head,) = found["add_norm"], found["linear_cross_entropy"]
    assert (
        norm["device"] == "NVIDIA H200"
        and norm["date"] == "2026-01-02"
        and norm["shape"] == [64, 8192]
    )
    assert norm["over"] == {"eager": 3.0, "compiled": 2.0, "compiled_chunked": None, "liger": 1.5}
    assert norm["share_of_copy"] == 0.91 and head["share_of_copy"] is None
    assert head["over"] == {"eager": 2.0, "compiled": None, "compiled_chunked": 1.0, "liger": None}
    assert found["rope"] == []
    out = listed(benchmarks=(BENCH,))[1]
    assert (
        out.count("not measured") == len(NAMES) - 2
        and "64 x 8192" in out
        and "91%" in out
        and "3.00 x" in out
    )


@pytest.mark.parametrize("content", [None, "{"])
def test_a_missing_or_broken_table_is_refused_without_a_traceback(
    listed: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None
) -> None:
    (tmp_path / "data").mkdir()
    if content is not None:
        (tmp_path / "data/kernels.json").write_text(content)
    monkeypatch.setattr(data_files, "assets", lambda: tmp_path)
    code, out, err = listed("--json")
    assert (
        code == 2
        and "kernels.json cannot be read" in err
        and "reinstall workbench" in json.loads(out)["error"]
    )


def test_torch_is_not_loaded() -> None:
    code = (
        "import sys; from workbench.cli import answer; answer(['kernels']); sys.exit('torch' "
        "in sys.modules)"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60).returncode
        == 0
    )


def test_the_wheel_holds_the_table() -> None:
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert '"data" = "workbench/_assets/data"' in project


def test_the_wheel_packs_the_library_alone() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    inside = [*wheel["packages"], *wheel["force-include"].values()]
    assert {path.split("/")[0] for path in inside} == {"workbench"}
