"""Every operator on a GPU: against fp64 at real widths, beyond 2^31 entries, from odd places, and
what is refused.

`interpreted/` tests without a GPU what needs none, by the same kernels under the interpreter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from workbench.adapters.frozen_linear import four_bit_linear
from workbench.kernels import activation, bias_dropout_residual, cross_entropy, residual_norm, rope
from workbench.kernels import linear_cross_entropy as head
from workbench.kernels.adamw import AdamWTensor, FusedAdamW
from workbench.kernels.four_bit_weight import FourBitWeight, quantize_four_bit
from workbench.kernels.four_bit_weight import reference as four_bit_reference
from workbench.kernels.fused_seams import replace_seams
from workbench.kernels.weight_only_gemv import reference as matvec_reference
from workbench.kernels.weight_only_gemv import weight_only_gemv
from workbench.kernels.weight_quantization import QuantizedWeight, quantize_weight
from workbench.models import Transformer
from workbench.models.seams import IGNORE_INDEX, rotary_positions
from workbench.plan.model.model_shape import Shape
from workbench.runtime_facts.four_bit_sizes import FourBitFormat

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE = "cuda"
ROWS = 300
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
"""Of the largest value of a result or a gradient."""
LARGE = 2**31
"""Entries that a 32-bit offset cannot reach."""
KERNELS = ("compiled", "fused")
CHOICES = [
    *[
        (width, dtype, "fused")
        for width in (64, 4096, 4098, 16384)
        for dtype in (torch.float32, torch.bfloat16)
    ],
    (4096, torch.float16, "fused"),
    (4098, torch.bfloat16, "compiled"),
]
"""Width, dtype, kernels; a compiler takes seconds for each kind."""


@dataclass(frozen=True)
class Operator:
    """`inputs(width)` on the host in fp64 (integers as they are), the `run(kernels, *inputs)` under
    test, the truth.

    The first `trained` floating inputs have gradients.
    """

    inputs: Callable[[int], list[Tensor]]
    run: Callable[..., Any]
    truth: Callable[..., Any]
    trained: int = 9


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def _norm(centred: bool) -> Operator:
    def inputs(width: int) -> list[Tensor]:
        return [normal(ROWS, width), normal(ROWS, width), 1 + 0.1 * normal(width), normal(width)][
            : 3 + centred
        ]

    def truth(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
        return residual_norm.reference(x, residual, weight, bias, 1e-5, centred)

    def run(
        kernels: str, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None = None
    ) -> Any:
        return residual_norm.add_norm(x, residual, weight, bias, 1e-5, centred, kernels)

    return Operator(inputs, run, truth)


def _rope(heads: int, keys: int) -> Operator:
    def inputs(width: int) -> list[Tensor]:
        size = min(256, width // heads // 2 * 2)
        tables = rotary_positions(torch.arange(ROWS // 2), size, 10000.0, torch.float64)
        return [
            normal(2, ROWS // 2, heads, size),
            normal(2, ROWS // 2, keys, size),
            tables.cos,
            tables.sin,
        ]

    return Operator(
        inputs, lambda kernels, *inputs: rope.rope(*inputs, kernels), rope.reference, trained=2
    )


def _activation(kind: str) -> Operator:
    def inputs(width: int) -> list[Tensor]:
        return [normal(ROWS, width), normal(width) if kind == "gelu" else normal(ROWS, width)]

    def arrange(x: Tensor, other: Tensor) -> Any:
        return (kind, x, None, other) if kind == "gelu" else (kind, x, other)

    def run(kernels: str, *inputs: Tensor) -> Any:
        return activation.activate(*arrange(*inputs), kernels=kernels)  # type: ignore[misc]

    return Operator(inputs, run, lambda *inputs: activation.reference(*arrange(*inputs)))


def targets(vocab: int) -> Tensor:
    found = torch.randint(vocab, (ROWS,))
    found[::7] = IGNORE_INDEX
    return found


def _loss(smoothing: float, z: float) -> Operator:
    def run(kernels: str, *inputs: Tensor) -> Any:
        return cross_entropy.cross_entropy(*inputs, smoothing=smoothing, z=z, kernels=kernels)

    return Operator(
        lambda width: [normal(ROWS, 8 * width - 1), targets(8 * width - 1)],
        run,
        lambda *inputs: cross_entropy.reference(*inputs, smoothing, z),
    )


def _head() -> Operator:
    def inputs(width: int) -> list[Tensor]:
        return [normal(ROWS, 256), normal(8 * width - 1, 256) / 16, targets(8 * width - 1)]

    def run(kernels: str, *inputs: Tensor) -> Any:
        return head.linear_cross_entropy(*inputs, kernels=kernels)

    return Operator(inputs, run, head.reference)


def _dropout() -> Operator:
    key, rate = 99, 0.3

    def inputs(width: int) -> list[Tensor]:
        return [normal(ROWS, width), normal(width), normal(ROWS, width), torch.arange(ROWS) * 2**33]

    def run(kernels: str, *inputs: Tensor) -> Any:
        return bias_dropout_residual.dropout_add(*inputs, key, rate, 5, kernels)

    return Operator(
        inputs, run, lambda *inputs: bias_dropout_residual.reference(*inputs, key, rate, 5)
    )


def _matvec(bits: int, tokens: int) -> Operator:
    def inputs(width: int) -> list[Tensor]:
        group = width if bits == 8 else min(128, width)
        weight = quantize_weight(normal(ROWS, width // group * group), bits, group)
        return [normal(tokens, width // group * group), weight.values, weight.scales]

    def arrange(x: Tensor, values: Tensor, scales: Tensor) -> tuple[Tensor, QuantizedWeight]:
        return x, QuantizedWeight(values, scales, x.shape[-1] // scales.shape[-1], bits)

    def run(kernels: str, *inputs: Tensor) -> Any:
        return weight_only_gemv(*arrange(*inputs), kernels)

    return Operator(inputs, run, lambda *inputs: matvec_reference(*arrange(*inputs)), trained=0)


def _frozen(form: FourBitFormat) -> Operator:
    def inputs(width: int) -> list[Tensor]:
        columns = max(1, width // form.group) * form.group
        *parts, _ = quantize_four_bit(normal(ROWS, columns), form)
        return [normal(7, columns), *(part for part in parts if isinstance(part, Tensor))]

    def weight(parts: Sequence[Tensor]) -> FourBitWeight:
        numbers, scales, *factors = parts
        return FourBitWeight(numbers, scales, factors[0] if factors else None, form)

    def run(kernels: str, x: Tensor, *parts: Tensor) -> Tensor:
        return four_bit_linear(x, weight(parts), kernels=kernels)

    def truth(x: Tensor, *parts: Tensor) -> Tensor:
        return x @ four_bit_reference(weight(parts)).double().t()

    return Operator(inputs, run, truth, trained=1)


OPERATORS = {
    "rmsnorm": _norm(False),
    "layernorm": _norm(True),
    "rope": _rope(8, 2),
    "rope, odd heads": _rope(5, 3),
    "swiglu": _activation("swiglu"),
    "geglu": _activation("geglu"),
    "bias and gelu": _activation("gelu"),
    "cross entropy": _loss(0.0, 0.0),
    "cross entropy, smoothed": _loss(0.1, 1e-3),
    "head": _head(),
    "dropout": _dropout(),
    "8 bits": _matvec(8, 1),
    "4 bits": _matvec(4, 1),
    "8 bits, 7 tokens": _matvec(8, 7),
    "4 bits, 8 tokens": _matvec(4, 8),
    "NF4": _frozen(FourBitFormat("nf4", 64, True)),
    "INT4": _frozen(FourBitFormat("int4", 32, False)),
}


def leaves_of(inputs: list[Tensor], trained: int) -> list[Tensor]:
    """The same tensors, those with gradients as leaves."""
    return [
        x.detach().requires_grad_(i < trained and x.is_floating_point())
        for i, x in enumerate(inputs)
    ]


def made_of(function: Callable[..., Any], leaves: list[Tensor]) -> tuple[Tensor, ...]:
    """Results for copies of the leaves, which may be worked on in place."""
    made = function(*(x * 1 if x.requires_grad else x for x in leaves))
    return made if isinstance(made, tuple) else (made,)


def results(function: Callable[..., Any], inputs: list[Tensor], trained: int) -> list[Tensor]:
    """Results and gradients, for incoming gradients that depend on their shapes alone."""
    leaves = leaves_of(inputs, trained)
    made = made_of(function, leaves)
    if not trained:
        return list(made)
    generator = torch.Generator().manual_seed(1)
    incoming = [torch.randn(x.shape, dtype=torch.float64, generator=generator).to(x) for x in made]
    held = [x for x in leaves if x.requires_grad]
    found = torch.autograd.grad(made, held, incoming)
    return [x.detach() for x in (*made, *found)]


def placed(inputs: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """On the card; floating ones in `dtype`."""
    return [x.to(DEVICE, dtype if x.is_floating_point() else x.dtype) for x in inputs]


def assert_near(found: list[Tensor], truth: list[Tensor], dtype: torch.dtype) -> None:
    for i, (mine, true) in enumerate(zip(found, truth, strict=True)):
        off = (mine.double() - true).abs().max() / true.abs().max().clamp(min=1e-3)
        assert off <= TOLERANCE[dtype], (
            f"result {i} of shape {tuple(true.shape)} is {float(off):.1e} off"
        )


@pytest.mark.parametrize(("width", "dtype", "kernels"), CHOICES, ids=str)
@pytest.mark.parametrize("name", OPERATORS)
def test_equals_plain_operators_in_fp64(
    name: str, width: int, dtype: torch.dtype, kernels: str
) -> None:
    torch.manual_seed(0)
    one = OPERATORS[name]
    inputs = placed(one.inputs(width), dtype)
    # What a 16-bit kernel is given is what the truth is given.
    truth = results(
        one.truth, [x.double() if x.is_floating_point() else x for x in inputs], one.trained
    )
    assert_near(results(partial(one.run, kernels), inputs, one.trained), truth, dtype)


def strided(x: Tensor) -> Tensor:
    """The same numbers, with others between the rows and, where there are several dimensions,
    between columns too.
    """
    if x.ndim < 2 or not x.is_floating_point():
        return x
    room = x.new_full((*x.shape[:-2], 2 * x.shape[-2], x.shape[-1] + 24), torch.nan)
    room[..., ::2, 8 : 8 + x.shape[-1]] = x
    return room[..., ::2, 8 : 8 + x.shape[-1]]


@pytest.mark.parametrize("name", OPERATORS)
def test_odd_strides_give_the_same(name: str) -> None:
    torch.manual_seed(0)
    one = OPERATORS[name]
    inputs = placed(one.inputs(512), torch.float32)
    spread = [strided(x) for x in inputs]
    assert any(not x.is_contiguous() for x in spread)

    def run(*own: Tensor) -> Any:
        # What `results` hands on has its own storage; here it must lie as it was spread.
        return one.run("fused", *(strided(x) for x in own))

    plain = results(partial(one.run, "fused"), inputs, one.trained)
    assert_near(results(run, inputs, one.trained), [x.double() for x in plain], torch.float32)


@pytest.mark.parametrize("name", OPERATORS)
def test_a_tensor_on_the_host_is_refused_by_name(name: str) -> None:
    one = OPERATORS[name]
    inputs = placed(one.inputs(64), torch.float32)
    for i in range(1, len(inputs)):
        wrong = [x * 1 if x.is_floating_point() else x for x in inputs]
        wrong[i] = wrong[i].cpu()
        with pytest.raises(
            ValueError, match=r"is on (cpu|cuda:0), but \w+ on .*; legal: one device"
        ):
            one.run("fused", *wrong)


@pytest.mark.parametrize("name", OPERATORS)
def test_no_operator_synchronizes_with_the_gpu(name: str) -> None:
    one = OPERATORS[name]
    leaves = leaves_of(placed(one.inputs(256), torch.bfloat16), one.trained)

    def both() -> None:
        made = made_of(partial(one.run, "fused"), leaves)
        if one.trained:
            torch.autograd.grad(
                made, [x for x in leaves if x.requires_grad], [torch.ones_like(x) for x in made]
            )

    both()
    torch.cuda.set_sync_debug_mode("error")
    try:
        both()
    finally:
        torch.cuda.set_sync_debug_mode("default")


# ---- beyond 2^31 entries -------------------------------------------------------------------------


def needs(gigabytes: int) -> None:
    free = torch.cuda.mem_get_info()[0]
    if free < gigabytes * 1e9:
        pytest.skip(f"needs {gigabytes} GB of a card's memory, {free / 1e9:.0f} are free")


def pattern(rows: int, columns: int) -> Tensor:
    """Rows in bf16, every one another."""
    x = torch.empty(rows, columns, dtype=torch.bfloat16, device=DEVICE)
    return x.normal_(generator=torch.Generator(DEVICE).manual_seed(0))


ENDS = (slice(0, 8), slice(-8, None))
"""The first and the last rows: what must be as if they were alone."""


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("centred", [False, True])
def test_norm_beyond_32_bits(centred: bool, kernels: str) -> None:
    needs(45)
    columns = 4096
    x = pattern(LARGE // columns + 8, columns)
    weight = torch.linspace(0.5, 1.5, columns, device=DEVICE, dtype=torch.bfloat16)
    bias = weight.flip(0) if centred else None

    def both(branch: Tensor) -> tuple[Tensor, ...]:
        leaf = branch.detach().requires_grad_()
        y, total = residual_norm.add_norm(leaf, branch, weight, bias, 1e-5, centred, kernels)
        return y.detach(), total.detach(), *torch.autograd.grad((y, total), leaf, (branch, branch))

    whole = both(x)
    for end in ENDS:
        for mine, true in zip(whole, both(x[end].clone()), strict=True):
            torch.testing.assert_close(mine[end], true, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("kernels", KERNELS)
def test_cross_entropy_beyond_32_bits(kernels: str) -> None:
    needs(20)
    vocab = 131072
    x = pattern(LARGE // vocab + 8, vocab)
    chosen = torch.arange(len(x), device=DEVICE) * 7919 % vocab

    def gradient(logits: Tensor, own: Tensor) -> Tensor:
        leaf = logits.detach().requires_grad_()
        loss = cross_entropy.cross_entropy(leaf.view_as(leaf), own, kernels=kernels)
        return torch.autograd.grad(loss, leaf)[0]

    ends = [(x[end].clone(), chosen[end]) for end in ENDS]
    whole = gradient(x, chosen)
    for end, (logits, own) in zip(ENDS, ends):
        torch.testing.assert_close(whole[end], gradient(logits, own), rtol=1e-2, atol=1e-6)
    assert bool((whole[-1].argmin() == chosen[-1]).item())


def test_a_quantised_weight_beyond_32_bits() -> None:
    needs(8)
    columns = 8192
    values = torch.empty(LARGE // columns + 8, columns, dtype=torch.int8, device=DEVICE)
    values.random_(-127, 128, generator=torch.Generator(DEVICE).manual_seed(0))
    scales = torch.linspace(0.5, 1.5, len(values), device=DEVICE)[:, None].to(torch.bfloat16)
    x = pattern(1, columns)
    whole = weight_only_gemv(x, QuantizedWeight(values, scales, columns, 8))
    for end in ENDS:
        torch.testing.assert_close(
            whole[:, end],
            weight_only_gemv(x, QuantizedWeight(values[end], scales[end], columns, 8)),
        )


# ---- what is more than an operator ---------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_adamw_equals_plain_operators(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    shapes = [(4096, 4096), (4099,), (3, 5)]
    masters = [torch.randn(shape, device=DEVICE) for shape in shapes]
    tensors, truth = [], []
    for master in masters:
        gradient, first = (torch.randn_like(master) for _ in range(2))
        second, gradient = first.square(), gradient.to(dtype)
        count = torch.full((), 4.0, device=DEVICE)
        held = None if dtype == torch.float32 else master
        parameter = master if held is None else master.to(dtype)
        tensors.append(AdamWTensor(parameter, gradient, first, second, count, held, 0.1))
        wide = [x.double() for x in (master, gradient * 0.5, first, second)]
        truth.append(reference_step(*wide))
    FusedAdamW(tensors, 0.9, 0.95, 1e-8).step(1e-2, torch.tensor(0.5, device=DEVICE))
    for mine, (parameter, first, second) in zip(tensors, truth):
        target = mine.parameter if mine.master is None else mine.master
        for x, true in ((target, parameter), (mine.moment1, first), (mine.moment2, second)):
            torch.testing.assert_close(x.double(), true, rtol=1e-5, atol=1e-6)
        assert torch.equal(mine.parameter, target.to(dtype)) and float(mine.steps) == 5


def reference_step(
    parameter: Tensor, gradient: Tensor, first: Tensor, second: Tensor
) -> tuple[Tensor, ...]:
    from workbench.kernels.adamw import reference

    return reference(parameter, gradient, first, second, 5, 1e-2, 0.9, 0.95, 1e-8, 0.1)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("style", ["llama", "gpt"])
def test_a_model_trains_alike(style: str, kernels: str) -> None:
    llama = {"mlp": "swiglu", "norm": "rmsnorm", "positions": "rope", "kv_heads": 2}
    gpt = {
        "mlp": "gelu",
        "norm": "layernorm",
        "positions": "learned",
        "biases": "all",
        "max_positions": 64,
    }
    shape = Shape(
        layers=2, hidden=256, heads=4, ffn=640, vocab=1001, **(llama if style == "llama" else gpt)
    )
    text = torch.randint(
        shape.vocab, (3, 65), device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(0)
    )

    def losses(kind: str) -> list[Tensor]:
        with torch.device(DEVICE):
            model = Transformer(shape)
        generator = torch.Generator(DEVICE).manual_seed(0)
        for parameter in model.parameters():
            parameter.data.normal_(0.0 if parameter.ndim > 1 else 1.0, 0.02, generator=generator)
        replace_seams(model, kind)
        for block in model.blocks.values():
            block.attention.attend.kernel = "efficient"  # flash attention takes no fp32
        loss = model(text[:, :-1], text[:, 1:].contiguous()) / 192
        return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]

    eager = losses("eager")
    largest = max(float(x.abs().max()) for x in eager[1:])
    for mine, true in zip(losses(kernels), eager, strict=True):
        assert float((mine - true).abs().max()) <= 1e-4 * max(
            float(true.abs().max()), 1e-2 * largest
        )
