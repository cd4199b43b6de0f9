"""What the planner takes from the benchmark: how much more, or less, than the textbook's bytes the
kernels cost.

`traffic` is the factor of `workbench.costmodel.compute.memory_bound.memory_bound_pass`: measured
seconds of one layer's norms, rotary positions and activation, forward and backward, over the
seconds in which its count of bytes could be copied. `loss_bytes` is that of `head_pass`: bytes a
logit whose copying takes as long as what the head does beside its three products.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.benchmarks.kernels_cases import seam
from tests.benchmarks.kernels_models import KERNELS, Size
from tests.benchmarks.kernels_timing import WHOLE_ROUNDS, Contest, Inputs, race, seconds_of
from workbench.costmodel.compute.seam_bytes import seam_bytes
from workbench.kernels.fused_seams import replace_seams
from workbench.models import seams


def textbook_bytes(size: Size, dtype: torch.dtype) -> dict[str, float]:
    """Bytes of a dense layer's memory-bound operators by pass, as the planner counts eager ones."""
    shape, count = size.shape, seam_bytes("eager", single_norm=False)
    norm = count.rmsnorm if shape.norm == "rmsnorm" else count.layernorm
    activation = count.gated if shape.gated else count.plain
    rotated = shape.q_width + shape.kv_width if shape.positions == "rope" else 0
    scale = size.tokens * dtype.itemsize / 2
    return {
        name: scale
        * (
            2 * shape.hidden * (norm[at] + count.residual[at])
            + rotated * count.rope[at]
            + shape.ffn * activation[at]
        )
        for at, name in enumerate(("forward", "backward"))
    }


def traffic(
    size: Size, device: torch.device, dtype: torch.dtype, bandwidth: float
) -> dict[str, Any]:
    """Both factors, by what runs, and what they were made of."""
    # First, while the allocator of a processor is as a run finds it.
    products, heads = head_seconds(size, device, dtype)
    parts = {
        name: (times, race(contest, device)[0])
        for name, (times, contest) in layer(size, device, dtype).items()
    }
    seconds = {
        kernels: {
            p: sum(times * found[kernels][p] for times, found in parts.values())
            for p in ("forward", "backward")
        }
        for kernels in KERNELS
    }
    counted = textbook_bytes(size, dtype)
    logits = size.tokens * size.shape.vocab
    return {
        "traffic": {
            k: sum(own.values()) * bandwidth / sum(counted.values()) for k, own in seconds.items()
        },
        "loss_bytes": {
            k: max(0.0, own - products) * bandwidth / logits for k, own in heads.items()
        },
        "traffic_of": {
            "hidden": size.shape.hidden,
            "ffn": size.shape.ffn,
            "vocab": size.shape.vocab,
            "tokens": size.tokens,
            "dtype": str(dtype).removeprefix("torch."),
            "textbook_bytes": counted,
            "seconds": seconds,
            "head_seconds": heads,
            "products_seconds": products,
        },
    }


def layer(size: Size, device: torch.device, dtype: torch.dtype) -> dict[str, tuple[int, Contest]]:
    """Operator -> how often a layer has it, and its contest between what a plan may say."""
    s = size.shape
    stream, wide = (size.batch, size.length, s.hidden), (size.batch, size.length, s.ffn)
    heads = [
        (size.batch, size.length, n, int(s.head_dim or 0)) for n in (s.heads, int(s.kv_heads or 0))
    ]
    weights = ("weight", "bias")[: 1 + (s.norm == "layernorm")]
    rope_dim = int(s.head_dim or 0)
    positions = seams.rotary_positions(
        torch.arange(size.length, device=device), rope_dim, s.rope_theta, dtype
    )

    def contest(
        name: str, shapes: list[tuple[int, ...]], make: Callable[[], nn.Module], **how: Any
    ) -> Contest:
        def inputs(generator: torch.Generator) -> Inputs:
            return tuple(
                torch.randn(one, device=device, dtype=dtype, generator=generator) for one in shapes
            )

        contestants = {kernels: seam(make, kernels, device, **how) for kernels in KERNELS}
        least = {"forward": 0, "backward": 0}
        return Contest(
            name, "", "", shapes[0], dtype, inputs, contestants, least, tuple(range(len(shapes)))
        )

    norm = contest(
        "norm",
        [stream, stream, *[(s.hidden,) for _ in weights]],
        lambda: seams.AddNorm(s.norm, s.hidden, s.norm_epsilon, len(weights) > 1),
        parameters=weights,
    )
    activation = contest(
        "activation",
        [wide] * (1 + s.gated),
        lambda: seams.Activate(s.mlp),
        call=lambda module, x, up=None: module(x, up),
    )
    rope = contest("rope", heads, seams.Rope, call=lambda module, q, k: module(q, k, positions))
    found = {"norm": (2, norm), "activation": (1, activation)}
    return found | ({"rope": (1, rope)} if s.positions == "rope" else {})


def head_seconds(
    size: Size, device: torch.device, dtype: torch.dtype
) -> tuple[float, dict[str, float]]:
    """Seconds of the head's three products alone, and of the whole head by what runs, forward and
    backward.

    A head of a quarter of the width, or what is looked for would drown in the products.
    """
    tokens, width, vocab = size.tokens, size.shape.hidden // 4, size.shape.vocab
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(
        1, tokens, width, device=device, dtype=dtype, generator=generator
    ).requires_grad_()
    targets = torch.randint(vocab, (1, tokens), device=device, generator=generator)
    weight = torch.randn(vocab, width, device=device, dtype=dtype, generator=generator).mul_(
        width**-0.5
    )
    logits = torch.randn(tokens, vocab, device=device, dtype=dtype, generator=generator)

    def products() -> None:
        flat = x.detach()[0]
        torch.mm(flat, weight.t()), torch.mm(logits, weight), torch.mm(logits.t(), flat)

    runs: dict[str, Callable[[], object]] = {"products": products}
    for kernels in KERNELS:
        head = seams.HeadLoss(width, vocab)
        head.weight = nn.Parameter(weight.clone())
        replace_seams(head, kernels, device.type)
        runs[kernels] = _head(head, x, targets)
    found = seconds_of(device, runs, WHOLE_ROUNDS[device.type])
    return found.pop("products"), found


def _head(head: nn.Module, x: Tensor, targets: Tensor) -> Callable[[], object]:
    return lambda: torch.autograd.grad(head(x, targets), (x, *head.parameters()))
