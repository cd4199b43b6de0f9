"""Names that drivers give GPUs, against the catalog's entries."""

from __future__ import annotations

import pytest

from workbench.errors import PlanError
from workbench.machine.attached import Attached, is_another_model, local_cluster
from workbench.machine.gpu_catalog import gpus
from workbench.units import GIB

NAMES = {
    "Tesla V100-SXM2-16GB": "v100-sxm2-16gb",
    "Tesla V100-PCIE-16GB": "v100-pcie-16gb",
    "Tesla V100-PCIE-32GB": "v100-pcie-32gb",
    "Tesla T4": "t4",
    "NVIDIA L4": "l4",
    "NVIDIA L40": "l40",
    "NVIDIA L40S": "l40s",
    "NVIDIA A10": "a10",
    "NVIDIA A10G": "a10g",
    "NVIDIA A30": "a30",
    "NVIDIA A40": "a40",
    "NVIDIA GeForce RTX 3090": "rtx-3090",
    "NVIDIA RTX A6000": "rtx-a6000",
    "NVIDIA RTX 6000 Ada Generation": "rtx-6000-ada",
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": "rtx-pro-6000",
    "NVIDIA A100-PCIE-40GB": "a100-pcie-40gb",
    "NVIDIA A100-SXM4-40GB": "a100-sxm-40gb",
    "NVIDIA A100-SXM4-80GB": "a100-sxm-80gb",
    "NVIDIA A100 80GB PCIe": "a100-pcie-80gb",
    "NVIDIA H100 PCIe": "h100-pcie-80gb",
    "NVIDIA H100 NVL": "h100-nvl-94gb",
    "NVIDIA H100 80GB HBM3": "h100-sxm-80gb",
    "NVIDIA H200": "h200-sxm-141gb",
    "NVIDIA H200 NVL": "h200-nvl-141gb",
    "NVIDIA GH200 480GB": "gh200-96gb",
    "NVIDIA B200": "b200",
    "NVIDIA GB200": "gb200",
    "NVIDIA B300 SXM6 AC": "b300",
    "NVIDIA A100-SXM4-80GB MIG 1g.10gb": "a100-sxm-80gb",
}
OTHERS = (
    "Quadro RTX 6000",
    "NVIDIA GeForce RTX 3090 Ti",
    "NVIDIA GeForce RTX 4090 D",
    "NVIDIA GeForce RTX 4090 Laptop GPU",
    "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",
    "NVIDIA GH200 144G HBM3e",
    "NVIDIA H20-3e",
    "NVIDIA H800 PCIe",
    "GRID A100-40C",
)
"""Models that the catalog does not hold."""


def attached_gpu(name: str) -> Attached:
    return Attached("cuda", 1, name, 20 * GIB, 8)


@pytest.mark.parametrize(("name", "entry"), NAMES.items())
def test_a_driver_name_is_one_entry_alone(name: str, entry: str) -> None:
    called = [
        other
        for other, found in gpus().items()
        if found.driver_names and not is_another_model(found.gpu, name)
    ]
    assert called == [entry]
    assert local_cluster(attached_gpu(name), 1)[0].name == entry


@pytest.mark.parametrize("name", OTHERS)
def test_another_model_of_the_same_family_is_unknown(name: str) -> None:
    with pytest.raises(PlanError, match=r"is not in data/gpus.yaml"):
        local_cluster(attached_gpu(name), 1)


def test_every_entry_answers_to_its_own_names_alone() -> None:
    for name, entry in gpus().items():
        for driver_name in entry.driver_names:
            assert local_cluster(attached_gpu(driver_name), 1)[0].name == name
