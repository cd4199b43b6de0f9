"""What an adapter and a 4-bit weight cost a linear layer on a GPU: `python -m
tests.benchmarks.adapted_linear [--rank 16] [--tokens 8192] [--json FILE]`.

Forward and backward of linear layers of Llama 3 8B in bf16, in turn: trained, frozen, frozen with
an adapter, and the same on weights in 4 bits, with what dequantizing them takes alone. Medians; the
L2 cache is emptied before each.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from datetime import date
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from triton.testing import do_bench

from workbench.adapters.four_bit_tensor import PARTS, FourBitTensor
from workbench.adapters.frozen_linear import adapted_linear
from workbench.kernels.four_bit_weight import dequantize_four_bit, quantize_four_bit
from workbench.runtime_facts.four_bit_sizes import FourBitFormat

LAYERS = {"q": (4096, 4096), "k": (1024, 4096), "up": (14336, 4096), "down": (4096, 14336)}
"""Of one Llama 3 8B block: [out, in]."""
FORMS = {"nf4": FourBitFormat("nf4", 64, True), "int4": FourBitFormat("int4", 64, False)}
SCALE = 2.0
ROUNDS, MILLISECONDS = 5, 20
Timed = Callable[[], object]


def drawn(*shape: int) -> Tensor:
    """Standard normal values in bf16."""
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def in_four_bits(weight: Tensor, form: FourBitFormat) -> FourBitTensor:
    """The weight, quantized."""
    stored = FourBitTensor(weight, form, "fused")
    for name, part in zip(PARTS, quantize_four_bit(weight, form)):
        if part is not None:
            getattr(stored, name).copy_(part)
    return stored


def passes(rows: int, columns: int, tokens: int, rank: int) -> dict[str, Timed]:
    """What is timed of one layer, by name; the gradient of x is computed in every backward."""
    x, gradient = drawn(tokens, columns).requires_grad_(), drawn(tokens, rows)
    trained = drawn(rows, columns).requires_grad_()
    frozen = trained.detach()
    a, b = drawn(rank, columns).requires_grad_(), drawn(rows, rank).requires_grad_()
    layers: dict[str, Timed] = {
        "trained": lambda: x @ trained.t(),
        "frozen": lambda: x @ frozen.t(),
        "lora": lambda: adapted_linear(x, frozen, None, a, b, SCALE),
        "lora of plain operators": lambda: x @ frozen.t() + SCALE * (x @ a.t() @ b.t()),
    }
    timed: dict[str, Timed] = {}
    for name, form in FORMS.items():
        stored = in_four_bits(frozen, form)
        timed[f"{name}, dequantize"] = partial(
            dequantize_four_bit, stored.stored(), torch.bfloat16, "fused"
        )
        layers[f"{name}, lora"] = partial(adapted_linear, x, stored, None, a, b, SCALE)

    def with_backward(layer: Timed) -> Timed:
        def step() -> None:
            y = layer()
            assert isinstance(y, Tensor)
            y.backward(gradient)
            for leaf in (x, trained, a, b):
                leaf.grad = None

        return step

    for name, layer in layers.items():
        timed[f"{name}, forward"] = layer
        timed[f"{name}, forward and backward"] = with_backward(layer)
    return timed


def measured(rows: int, columns: int, tokens: int, rank: int) -> dict[str, float]:
    """Microseconds, medians of the rounds' medians."""
    timed = passes(rows, columns, tokens, rank)
    found: dict[str, list[float]] = {name: [] for name in timed}
    for _ in range(ROUNDS):
        for name, run in timed.items():
            found[name].append(do_bench(run, rep=MILLISECONDS, return_mode="median"))
    return {name: round(1e3 * median(each), 1) for name, each in found.items()}


def main() -> None:
    """Measure every layer, print a JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--json", type=Path, help="also written here")
    asked = parser.parse_args()
    found: dict[str, Any] = {
        "source": "measured",
        "device": torch.cuda.get_device_name(),
        "torch": version("torch"),
        "date": date.today().isoformat(),
        "tokens": asked.tokens,
        "rank": asked.rank,
        "microseconds": {
            f"{name} {list(size)}": measured(*size, asked.tokens, asked.rank)
            for name, size in LAYERS.items()
        },
    }
    text = json.dumps(found, indent=1) + "\n"
    print(text)
    if asked.json:
        asked.json.write_text(text)


if __name__ == "__main__":
    main()
