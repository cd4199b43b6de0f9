"""What is attached, against machines that a stub of NVML describes."""

from __future__ import annotations

import sys
from pathlib import Path

import pynvml
import pytest

from tests.machine import stub_nvml
from tests.machine.stub_nvml import A100, GIB, H100, StubGpu, gpus
from workbench.errors import PlanError
from workbench.machine import attached as machine
from workbench.machine import gpu_catalog, nvml_devices
from workbench.machine.attached import Attached, attached, local_cluster

SLICE = f"{A100} MIG 1g.10gb"
LARGER_SLICE = f"{A100} MIG 3g.40gb"


@pytest.fixture(autouse=True)
def cuda_build(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """torch with CUDA, no variable set, no driver's files."""
    monkeypatch.setattr(machine, "_torch_cuda", lambda: ("torch 2.11.0", "12.8"))
    monkeypatch.setattr(nvml_devices, "DEVICE_NODES", tmp_path)
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        monkeypatch.delenv(name, raising=False)


def split(*slices: StubGpu | None) -> StubGpu:
    """A GPU in MIG mode, which tells its own memory to the privileged alone."""
    return StubGpu(A100, "GPU-m", slices=list(slices), error=pynvml.NVML_ERROR_NO_PERMISSION)


def part(name: str = SLICE, uuid: str = "MIG-a", gib: float = 9.8) -> StubGpu:
    return StubGpu(name, uuid, gib=gib, reserved_gib=0.1)


def found_with(
    patch: pytest.MonkeyPatch, visible: str | None, *described: StubGpu, error: int | None = None
) -> Attached:
    stub_nvml.install(patch, described, error)
    if visible is not None:
        patch.setenv("CUDA_VISIBLE_DEVICES", visible)
    return attached()


@pytest.mark.parametrize(
    ("visible", "seen"),
    [
        (None, "abcd"),
        ("2,0", "ca"),
        ("GPU-c,GPU-a000", "ca"),  # a UUID may be cut short
        ("3,1,9,0", "db"),  # CUDA stops at the first that is not there
        ("1,,2", "b"),
        ("0,-1,2", "a"),
        ("GPU-b,1", "b"),  # another kind than the first
    ],
)
def test_gpus_are_those_that_cuda_would_see(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, seen: str
) -> None:
    found = found_with(monkeypatch, visible, *gpus(4))
    assert (found.device, found.count) == ("cuda", len(seen))
    assert [gpu.uuid for gpu in found.gpus] == [f"GPU-{letter}000" for letter in seen]


@pytest.mark.parametrize("visible", ["9", "0,0", "GPU-x", "GPU-b,GPU-b000", "all", "MIG-a"])
def test_a_choice_that_names_no_gpu_is_refused(
    monkeypatch: pytest.MonkeyPatch, visible: str
) -> None:
    found = found_with(monkeypatch, visible, *gpus(2))
    assert found.unusable and visible in found.why_not_cuda
    with pytest.raises(PlanError, match=r"cluster.gpu: is local, and CUDA_VISIBLE_DEVICES is"):
        local_cluster(found, 1)


@pytest.mark.parametrize("visible", ["", "-1", "NoDevFiles"])
def test_an_empty_choice_takes_cpu_ranks(monkeypatch: pytest.MonkeyPatch, visible: str) -> None:
    found = found_with(monkeypatch, visible, *gpus(2))
    assert found.device == "cpu" and not found.unusable
    assert local_cluster(found, 1)[0].device == "cpu"


def test_a_mig_slice_is_planned_as_a_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU of 80 GiB tells its memory to the privileged alone."""
    gpu = split(part(LARGER_SLICE, "MIG-b", 39.6), None, part())
    found = found_with(monkeypatch, None, gpu)
    assert (found.count, found.name, found.memory_bytes) == (
        1,
        LARGER_SLICE,
        int(39.6 * GIB) - GIB // 10,
    )
    found = found_with(monkeypatch, "MIG-a", gpu)
    planned, fabric = local_cluster(found, 1)
    whole = gpu_catalog.gpus()["a100-sxm-80gb"].gpu
    assert (planned.name, planned.title, fabric.gpus_per_node) == ("a100-sxm-80gb", SLICE, 1)
    assert planned.memory_gib == pytest.approx(9.7)
    assert planned.tflops["bf16"] == pytest.approx(whole.tflops["bf16"] / 7)
    assert planned.bandwidth_gbs == pytest.approx(whole.bandwidth_gbs * 9.7 / whole.memory_gib)
    with pytest.raises(
        PlanError, match=r"only 1 are attached here .*CUDA shows a process one MIG slice"
    ):
        local_cluster(found, 2)


@pytest.mark.parametrize(
    ("described", "says"),
    [
        ([split()], "no slice is made"),
        ([split(part()), *gpus(1)], "some of the GPUs are split by MIG"),
        ([split(part("A100 in parts"))], "does not say its size"),
        ([StubGpu(error=pynvml.NVML_ERROR_NO_PERMISSION)], "Insufficient Permissions"),
        ([*gpus(1), StubGpu(uuid="GPU-l", error=pynvml.NVML_ERROR_GPU_IS_LOST)], "GPU is lost"),
    ],
    ids=["no-slice", "mixed", "unnamed-slice", "no-permission", "lost"],
)
def test_gpus_that_cannot_be_described_are_no_cpu_ranks(
    monkeypatch: pytest.MonkeyPatch, described: list[StubGpu], says: str
) -> None:
    found = found_with(monkeypatch, None, *described)
    assert found.unusable and says in found.why_not_cuda
    with pytest.raises(PlanError, match="doctor"):
        local_cluster(found, 1)


@pytest.mark.parametrize(
    ("error", "node", "unusable"),
    [
        (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, False, False),
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, False, False),
        (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, True, True),
        (pynvml.NVML_ERROR_NO_PERMISSION, False, True),
        (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, False, True),
    ],
)
def test_a_driver_that_does_not_answer_is_not_an_absent_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: int, node: bool, unusable: bool
) -> None:
    (tmp_path / "nvidiactl").touch()  # this one is there without any GPU
    if node:
        (tmp_path / "nvidia0").touch()
    found = found_with(monkeypatch, None, error=error)
    assert (found.device, found.unusable) == ("cpu", unusable)
    assert str(pynvml.NVMLError(error)) in found.why_not_cuda
    assert not found_with(monkeypatch, "", error=error).unusable


@pytest.mark.parametrize("node", [False, True])
def test_without_the_package_gpus_are_not_overlooked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, node: bool
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    if node:
        (tmp_path / "nvidia3").touch()
    found = attached()
    assert found.unusable == node and "nvidia-ml-py is not installed" in found.why_not_cuda


def test_a_torch_without_cuda_is_refused_where_gpus_are_attached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine, "_torch_cuda", lambda: ("torch 2.11.0", None))
    found = found_with(monkeypatch, None, *gpus(2))
    assert found.unusable and f"2 x {H100} here" in found.why_not_cuda
    with pytest.raises(PlanError, match=r"build without CUDA; .*CUDA_VISIBLE_DEVICES= "):
        local_cluster(found, 1)


@pytest.mark.parametrize(
    ("version_py", "cuda"),
    [
        ("__version__ = '2.11.0'\ncuda: Optional[str] = '12.8'\ngit_version = 'a'\n", "12.8"),
        ("__version__ = '2.11.0'\ncuda: Optional[str] = None\nhip = '6.4'\n", None),
        ("__version__ = '2.11.0'\ncuda = '13.0'\n", "13.0"),
    ],
)
def test_the_build_of_torch_is_read_from_its_version_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version_py: str, cuda: str | None
) -> None:
    """A build without CUDA need not be called `+cpu`."""
    monkeypatch.undo()
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "version.py").write_text(version_py)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert machine._torch_cuda() == ("torch 2.11.0", cuda)


def test_unlike_gpus_are_refused_until_those_of_one_model_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    described = [StubGpu(H100, "GPU-a"), StubGpu(A100, "GPU-b", gib=79.0), StubGpu(H100, "GPU-c")]
    found = found_with(monkeypatch, None, *described)
    with pytest.raises(PlanError, match=f"not alike: {H100}, {A100}.*CUDA_DEVICE_ORDER"):
        local_cluster(found, 1)  # CUDA's default order puts the fastest first
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    gpu, _ = local_cluster(found, 1)
    assert gpu.name == "h100-sxm-80gb" and gpu.memory_gib == 79.5
    with pytest.raises(PlanError, match="not alike"):
        local_cluster(found, 2)
    assert local_cluster(found_with(monkeypatch, "0,2", *described), 2)[0].name == "h100-sxm-80gb"


@pytest.mark.parametrize(("version_2", "usable"), [(True, 79.25), (False, 79.65)])
def test_usable_memory_is_what_the_driver_leaves(
    monkeypatch: pytest.MonkeyPatch, version_2: bool, usable: float
) -> None:
    gpu = StubGpu(gib=79.65, reserved_gib=0.4, supports_v2=version_2)
    found = found_with(monkeypatch, None, gpu)
    assert local_cluster(found, 1)[0].memory_gib == pytest.approx(usable)
