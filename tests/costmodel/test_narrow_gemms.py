"""GEMMs in 8 and 4 bits by recipe: rates, and what quantizing their operands moves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from workbench.costmodel.compute.kernel_rates import DeviceRates, device_rates, gemm_seconds
from workbench.costmodel.compute.memory_bound import memory_bound_pass
from workbench.costmodel.inputs.quantized_formats import FORMATS
from workbench.costmodel.inputs.rank_workload import Workload, workload
from workbench.costmodel.rates.constants import constants
from workbench.costmodel.rates.fitted_constants import FittedConstants
from workbench.errors import PlanError
from workbench.machine.gpu_catalog import gpus
from workbench.plan.rules.supported import unsupported
from workbench.plan.schema import NARROW, Plan

B300 = "b300"
B300_GPU = gpus()[B300].gpu
TOKENS = 31 * 512
LAYER = ((12288, 4096), (4096, 4096), (16384, 4096), (4096, 16384))
"""Columns and inner dim of the GEMMs of a layer that Transformer Engine's docs/examples/
gemm_profiling times on a B300: three passes of each over 31 x 512 tokens.
"""
GEMMS_MS = {"fp8": 6.812, "mxfp8": 7.161, "nvfp4": 3.764}
"""Its times of a layer where operands are quantized already."""
WITH_CASTS_MS = {"fp8": 9.147, "mxfp8": 8.984, "nvfp4": 6.453}
"""Its times where each GEMM quantizes its own."""


def rates(precision: str) -> DeviceRates:
    usual = constants(B300_GPU, "fused", "megatron", FittedConstants())
    return device_rates(B300_GPU, precision, usual)


def planned(precision: str, gpu: str = B300, **more: Any) -> Workload:
    set = {"strategy.precision": precision, "strategy.stack": "megatron-bridge", **more}
    return workload(Plan.of("llama-3-8b", gpu=gpu, gpus=8, strategy="ddp", set=set).resolve())


@pytest.mark.parametrize("precision", GEMMS_MS)
def test_rates_are_those_of_transformer_engines_benchmark(precision: str) -> None:
    """Within a tenth, of which most is its B300's, faster than the one of the catalog's source."""
    m = rates(precision)
    seconds = sum(3 * gemm_seconds(m, TOKENS, n, k, 2, True) for n, k in LAYER)
    assert 1e3 * float(seconds) == pytest.approx(GEMMS_MS[precision], rel=0.1)


@pytest.mark.parametrize(("precision", "within"), [("fp8", 0.17), ("mxfp8", 0.14), ("nvfp4", 0.27)])
def test_casts_take_what_the_benchmark_adds_for_them(precision: str, within: float) -> None:
    """Kernels that write two orders reach 0.65 of a B200's memory bandwidth (ROCm/TransformerEngine
    pull request 598), in place of 0.8; Hadamard transforms and stochastic rounding take NVFP4's
    more.
    """
    elements = 0
    for n, k in LAYER:  # each of three GEMMs quantizes both of its operands
        elements += 2 * TOKENS * k + 2 * n * k + 2 * TOKENS * n
    apart, _ = FORMATS[precision].quantization_bytes(B300_GPU)
    seconds = elements * apart / rates(precision).bandwidth
    added = WITH_CASTS_MS[precision] - GEMMS_MS[precision]
    assert 1e3 * seconds == pytest.approx(added, rel=within)


@pytest.mark.parametrize(
    ("gpu", "precision", "apart", "after_norm"),
    [
        # Largest entry, read, and written in both orders; capability 10.x takes one for both.
        ("h100-sxm-80gb", "fp8", 2 + 2 + 2, 2 + 2),
        ("b200", "fp8", 2 + 2 + 1, 2 + 1),
        ("rtx-5090", "fp8", 2 + 2 + 2, 2 + 2),  # of compute capability 12.0, which takes TN alone
        # Scales of 32 elements are found as they are read: norms write 8 bits themselves.
        ("b200", "mxfp8", 2 + 2 * (1 + 1 / 32), 0),
        ("b200", "nvfp4", 2 + 2 + 2 * (1 / 2 + 1 / 16), 2 + 2 * (1 / 2 + 1 / 16)),
    ],
)
def test_bytes_of_quantizing_an_element(
    gpu: str, precision: str, apart: float, after_norm: float
) -> None:
    assert FORMATS[precision].quantization_bytes(gpus()[gpu].gpu) == (apart, after_norm)


def test_outputs_of_attention_and_activation_are_quantized_apart() -> None:
    """Transformer Engine's linear layers quantize what is no norm's output; in backward all output
    gradients: of the projection, of down, of query, key and value, of gate and up.
    """
    w, sixteen = planned("mxfp8"), planned("bf16")
    m = replace(rates("mxfp8"), host_runs_ahead=True)
    narrow, wide = (memory_bound_pass(x, m, False) for x in (w, sixteen))
    each = (2 + 2 * (1 + 1 / 32)) * w.tokens / m.bandwidth * m.constants.plain_traffic
    assert float(narrow.forward - wide.forward) == pytest.approx(each * (4096 + 14336))
    gradients = 2 * 4096 + (4096 + 1024 + 1024) + 2 * 14336
    assert float(narrow.backward - wide.backward) == pytest.approx(each * gradients)


def test_4_bits_of_16_elements_share_a_scale() -> None:
    assert FORMATS["nvfp4"].element_bytes == 1 / 2 + 1 / 16
    assert FORMATS["mxfp8"].element_bytes == 1 + 1 / 32


@pytest.mark.parametrize(
    ("gpu", "precision", "orders"),
    [
        ("h100-sxm-80gb", "fp8", 2),
        ("b200", "fp8", 1),
        ("rtx-pro-6000", "fp8", 2),
        ("b200", "mxfp8", 2),
        ("b200", "nvfp4", 2),
    ],
)
def test_orders_in_which_an_operand_is_kept(gpu: str, precision: str, orders: int) -> None:
    """Transformer Engine, is_non_tn_fp8_gemm_supported: a transposed copy for tensors of one scale
    except on compute capability 10.x; blocks are quantized along rows and along columns.
    """
    assert FORMATS[precision].orders(gpus()[gpu].gpu) == orders


def test_every_narrow_precision_has_a_format() -> None:
    assert set(FORMATS) == set(NARROW)


def test_every_gpu_with_a_rate_of_fp8_says_which_layouts_its_gemms_take() -> None:
    silent = [
        name
        for name, entry in gpus().items()
        if "fp8" in entry.gpu.tflops and entry.gpu.fp8_gemm_layouts is None
    ]
    assert not silent


def test_who_has_them_and_who_runs_them() -> None:
    with pytest.raises(PlanError, match=r"mxfp8, which h100-sxm-80gb does not have; legal: .*fp8"):
        planned("mxfp8", "h100-sxm-80gb")
    own = Plan.of("tiny", gpu="b200", gpus=1, set={"strategy.precision": "mxfp8"}).resolve()
    assert "strategy.precision" in [problem.field for problem in unsupported(own, "run")]
    assert not unsupported(own, "estimate")
