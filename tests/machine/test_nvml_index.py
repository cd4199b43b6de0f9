"""GPUs and MIG slices by the UUID that torch gives."""

import pynvml
import pytest

from tests.machine import stub_nvml
from tests.machine.stub_nvml import A100, GIB, StubGpu
from workbench.machine.nvml_index import nvml_cores, nvml_memory_used


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three GPUs, of which the second is split."""
    part = StubGpu(f"{A100} MIG 1g.10gb", "MIG-s", gib=9.75, free_gib=4.75)
    split = StubGpu(A100, "GPU-b", slices=[None, part], error=pynvml.NVML_ERROR_NO_PERMISSION)
    stub_nvml.install(monkeypatch, [StubGpu(uuid="GPU-a"), split, StubGpu(uuid="GPU-c")])


def test_a_mig_slice_has_the_cores_of_its_gpu() -> None:
    assert [nvml_cores(uuid) for uuid in ("a", "c", "s")] == [{0, 1}, {8, 9}, {4, 5}]


def test_memory_in_use_is_the_slices_own() -> None:
    assert nvml_memory_used("a", 7).by_all == 10 * GIB
    assert nvml_memory_used("s", 7).by_all == 5 * GIB


def test_an_unknown_uuid_is_told() -> None:
    with pytest.raises(pynvml.NVMLError, match="Not Found"):
        nvml_cores("x")
