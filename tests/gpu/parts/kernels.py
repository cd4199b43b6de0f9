"""Fused kernels against fp64 (`tests/kernels/test_gpu.py`), without those that Inductor compiles.

A dry run has Triton's interpreter run the same kernels on the CPU, at small widths of the same
kind: a power of two, one that is none.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import torch

from tests.gpu.checks import Check, Evidence

OPERATORS = (
    "rmsnorm",
    "layernorm",
    "rope",
    "rope, odd heads",
    "swiglu",
    "geglu",
    "bias and gelu",
    "cross entropy",
    "cross entropy, smoothed",
    "head",
    "dropout",
    "8 bits",
    "4 bits",
    "8 bits, 7 tokens",
    "4 bits, 8 tokens",
    "NF4",
    "INT4",
)
"""Those of `test_gpu.OPERATORS`, which cannot be asked before the interpreter is chosen."""
SMALL_WIDTHS = {64: 32, 4096: 128, 4098: 130, 16384: 256}
SMALL_ROWS = 6
INTERPRETER = "Triton's interpreter has no streams, and no memory but the host's"


def gpu_tests(evidence: Evidence) -> ModuleType:
    """`tests/kernels/test_gpu.py`, set up for the check's device."""
    if evidence.dry:
        os.environ["TRITON_INTERPRET"] = "1"
    from tests.kernels import test_gpu
    from workbench.kernels.backends.triton_compat import INTERPRETED

    if evidence.dry:
        assert INTERPRETED, "Triton decides at import whether it interprets: kernels go first"
        test_gpu.DEVICE, test_gpu.ROWS = "cpu", SMALL_ROWS
    return test_gpu


def attempt(evidence: Evidence, name: str, test: Callable[[], Any]) -> None:
    """One test as one assertion."""
    try:
        test()
    except Exception as error:
        evidence.expect(name, False, error=f"{type(error).__name__}: {error}"[:1000])
    else:
        evidence.expect(name, True)


def operator(name: str, evidence: Evidence) -> None:
    """One operator at all widths and dtypes, from odd places, and what is asked of it on a GPU."""
    tests = gpu_tests(evidence)
    for width, dtype, kernels in tests.CHOICES:
        if kernels == "compiled":
            continue
        size = SMALL_WIDTHS[width] if evidence.dry else width
        test = partial(tests.test_equals_plain_operators_in_fp64, name, size, dtype, kernels)
        attempt(evidence, f"width {width}, {str(dtype).removeprefix('torch.')}", test)
    attempt(evidence, "odd strides", partial(tests.test_odd_strides_give_the_same, name))
    rest = {
        "a tensor on the host is refused": tests.test_a_tensor_on_the_host_is_refused_by_name,
        "no synchronization": tests.test_no_operator_synchronizes_with_the_gpu,
    }
    if evidence.on_gpu(INTERPRETER, *rest):
        for what, asked in rest.items():
            attempt(evidence, what, partial(asked, name))


def beyond_32_bits(evidence: Evidence) -> None:
    """Tensors of more than 2^31 entries."""
    names = ("norm", "layer norm", "cross entropy", "quantized weight")
    if not evidence.on_gpu("it needs tens of GB of a GPU's memory", *names):
        return
    tests = gpu_tests(evidence)
    asked = (
        partial(tests.test_norm_beyond_32_bits, False, "fused"),
        partial(tests.test_norm_beyond_32_bits, True, "fused"),
        partial(tests.test_cross_entropy_beyond_32_bits, "fused"),
        tests.test_a_quantised_weight_beyond_32_bits,
    )
    for name, test in zip(names, asked, strict=True):
        attempt(evidence, name, test)


def optimizer_and_models(evidence: Evidence) -> None:
    """AdamW over many tensors, and models that train alike."""
    names = ("AdamW fp32", "AdamW bf16", "llama", "gpt")
    if not evidence.on_gpu("the interpreter takes minutes for so many entries", *names):
        return
    tests = gpu_tests(evidence)
    asked = (
        partial(tests.test_adamw_equals_plain_operators, torch.float32),
        partial(tests.test_adamw_equals_plain_operators, torch.bfloat16),
        partial(tests.test_a_model_trains_alike, "llama", "fused"),
        partial(tests.test_a_model_trains_alike, "gpt", "fused"),
    )
    for name, test in zip(names, asked, strict=True):
        attempt(evidence, name, test)


CHECKS = [
    *(Check(name, partial(operator, name), 120) for name in OPERATORS),
    Check("AdamW and models", optimizer_and_models, 90),
    Check("beyond 2^31 entries", beyond_32_bits, 90),
]
