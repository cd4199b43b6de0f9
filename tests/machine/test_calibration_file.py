"""A plan that names a calibration: pinned by its hash; refused where the file is none, or is of
another machine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from workbench.errors import PlanError
from workbench.machine import calibration_file
from workbench.machine.attached import attached, local_cluster
from workbench.machine.calibration_file import Calibration
from workbench.plan.schema import Plan
from workbench.safe_io import yaml_files


def machine(**changes: Any) -> dict[str, Any]:
    """This machine, as a calibration names it."""
    found = attached()
    gpu, _ = local_cluster(found, 1)
    named = {
        "device": gpu.device,
        "card": gpu.name,
        "title": found.name,
        "count": found.count,
        "cores": found.cores,
    }
    rest = {
        "fingerprint": calibration_file.fingerprint(found),
        "backend": "gloo",
        "versions": {"torch": "2.12.0"},
    }
    return {**named, **rest, "date": "2026-01-01", **changes}


def measured(**changes: Any) -> dict[str, Any]:
    """The smallest calibration, as plain data."""
    host = {
        "ranks": 1,
        "operator_us": 2,
        "autograd_us": 6.0,
        "step_us": 100.0,
        "microbatch_us": 50.0,
        "layer_us": 70.0,
    }
    gemm = {"rows": 64, "columns": 64, "inner": 64, "dtype": "fp32", "ranks": 1, "seconds": 1e-5}
    stream = {"bytes": 49152, "ranks": 1, "seconds": 3e-6}
    return {
        "version": 1,
        "machine": machine(),
        "host": [{**host, "layer_step_us": 9.0}],
        "gemm": [gemm],
        "memory": [stream],
        **changes,
    }


def written(folder: Path, **changes: Any) -> Path:
    path = folder / "calibration.yaml"
    calibration_file.write_calibration(Calibration.model_validate(measured(**changes)), path)
    return path


def named(path: Path | str, gpu: str = "local", **changes: Any) -> Plan:
    return Plan.of("tiny", gpu=gpu, gpus=2, strategy="ddp").replace(
        **{"cluster.calibration": str(path), **changes}
    )


def refusal(plan: Plan) -> PlanError:
    with pytest.raises(PlanError) as caught:
        plan.resolve()
    return caught.value


def test_a_file_reads_back_as_it_was_written(tmp_path: Path) -> None:
    path = written(tmp_path)
    assert calibration_file.read_calibration(path) == Calibration.model_validate(measured())
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    assert "seconds: 1.0e-05}" in path.read_text(), "points stand on one line each"


def test_a_resolved_plan_pins_the_file_and_its_hash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path)
    monkeypatch.chdir(tmp_path)
    full = named("calibration.yaml").pin()
    assert full.cluster.calibration == str(path)
    assert full.cluster.calibration_sha256 == calibration_file.calibration_sha256(path)
    assert full.pin() == full, "also where the GPU is written out"


def test_a_file_that_changed_since_is_refused(tmp_path: Path) -> None:
    full = named(written(tmp_path)).pin()
    written(tmp_path, machine=machine(date="2026-01-02"))
    error = refusal(full)
    assert [p.field for p in error.problems] == ["cluster.calibration_sha256"]
    assert "remove the field" in str(error)


def test_a_hash_without_a_file_is_refused() -> None:
    plan = Plan.of("tiny").replace(**{"cluster.calibration_sha256": "ab" * 32})
    assert "names no file" in str(refusal(plan))


@pytest.mark.parametrize(
    ("change", "named_in_error"),
    [
        ({"gemm": [{**measured()["gemm"][0], "seconds": float("nan")}]}, "gemm.0.seconds: is nan"),
        ({"gemm": [{**measured()["gemm"][0], "seconds": -1.0}]}, "gemm.0.seconds: is -1.0"),
        ({"gemm": []}, "gemm"),
        ({"memory": [{**measured()["memory"][0], "bytes": 0}]}, "memory.0.bytes: is 0"),
        (
            {"host": [{**measured()["host"][0], "operator_us": "fast"}]},
            "host.0.operator_us: is 'fast'",
        ),
        ({"scale": {"compute": 0}}, "scale.compute: is 0"),
        ({"version": 4}, "version: is 4"),
        ({"speed": 3}, "speed: unknown key; legal: version, machine"),
    ],
)
def test_what_cannot_be_is_refused_by_its_place(
    tmp_path: Path, change: dict[str, Any], named_in_error: str
) -> None:
    from workbench.safe_io import yaml_files

    path = tmp_path / "bad.yaml"
    path.write_text(yaml_files.dump(measured(**change)))
    error = refusal(named(path))
    assert [p.field for p in error.problems] == ["cluster.calibration"]
    assert named_in_error in str(error) and "workbench calibrate -o" in str(error)


@pytest.mark.parametrize(
    "content", [b"", b"- 1", b"{a: [", b"a: 1\na: 2", b"\xff\xfe\x00", b"[" * 5000]
)
def test_no_calibration_at_all_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad.yaml"
    path.write_bytes(content)
    error = refusal(named(path))
    assert error.problems[0].field == "cluster.calibration" and "is no calibration" in str(error)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none.yaml", tmp_path):
        error = refusal(named(path))
        assert error.problems[0].field == "cluster.calibration" and "workbench calibrate" in str(
            error
        )


def test_a_file_of_another_gpu_is_refused(tmp_path: Path) -> None:
    error = refusal(named(written(tmp_path), gpu="h100-sxm-80gb"))
    assert "h100-sxm-80gb" in str(error) and "local" in str(error)


def test_a_file_of_another_host_is_refused_only_for_what_is_attached(tmp_path: Path) -> None:
    path = written(tmp_path, machine=machine(fingerprint="0" * 16))
    assert "another machine" in str(refusal(named(path)))
    gpu, fabric = local_cluster(attached(), 2)
    plan = named(path).replace(
        **{"cluster.gpu": gpu.model_dump(), "cluster.fabric": fabric.model_dump()}
    )
    assert plan.resolve().cluster.calibration == str(path), (
        "a written-out GPU is a plan for that machine, seen here"
    )


def test_the_fingerprint_names_no_host_and_tells_machines_apart() -> None:
    from dataclasses import replace

    found = attached()
    assert calibration_file.fingerprint(found) == calibration_file.fingerprint(attached())
    assert (
        len(
            {
                calibration_file.fingerprint(x)
                for x in (
                    found,
                    replace(found, cores=found.cores + 1),
                    replace(found, memory_bytes=2 * found.memory_bytes),
                    replace(found, name="another"),
                )
            }
        )
        == 4
    )


def test_a_calibration_is_parsed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = named(written(tmp_path))
    plan.resolve()
    monkeypatch.setattr(yaml_files, "parse", lambda *_, **__: pytest.fail("parsed again"))
    plan.resolve()
