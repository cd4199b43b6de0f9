"""Every operator of `workbench.kernels` as a contest: its inputs at a width, its peers, the bytes
that it must move.

Eager is what the models run without it (`workbench.models.seams`); compiled is the operator's plain
reference under torch.compile, autograd's backward included; fused is ours.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.adamw import adamw as torch_adamw

from tests.benchmarks import kernels_liger as liger
from tests.benchmarks.kernels_timing import Contest, Inputs, Outputs, Prepare
from workbench.kernels import activation as act
from workbench.kernels import (
    adamw,
    bias_dropout_residual,
    cross_entropy,
    residual_norm,
    rope,
    weight_quantization,
)
from workbench.kernels.backends.triton_compat import runs_triton
from workbench.kernels.fused_seams import replace_seams
from workbench.kernels.weight_only_gemv import reference as matvec_reference
from workbench.kernels.weight_only_gemv import weight_only_gemv
from workbench.models import seams
from workbench.models.counter_dropout import SAMPLE_STRIDE, Dropout
from workbench.models.seams import at_least_fp32

HEAD_DIM = {"cuda": 128, "cpu": 32}
RATE = 0.1
EPSILON = 1e-5
STEP = {"rate": 1e-3, "beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8, "decay": 0.1}

Random = Callable[..., Tensor]
"""Normal numbers of a shape, on the device and in the dtype of the contest."""


def plain(function: Callable[..., Any]) -> Prepare:
    """A function of the inputs; a lone result becomes a tuple."""

    def prepare(*inputs: Tensor | None) -> Callable[[], Outputs]:
        return partial(_tupled, function, *inputs)

    return prepare


def _tupled(function: Callable[..., Any], *inputs: Tensor | None) -> Outputs:
    made = function(*inputs)
    return made if isinstance(made, tuple) else (made,)


def seam(
    make: Callable[[], nn.Module],
    kernels: str,
    device: torch.device,
    parameters: tuple[str, ...] = (),
    call: Callable[..., Any] | None = None,
) -> Prepare:
    """A seam of the models as a plan's `kernels` has it; the last inputs are its parameters.
    `call(module, *inputs)` where those are not what it is called with.
    """

    def prepare(*inputs: Tensor | None) -> Callable[[], Outputs]:
        module, split = make(), len(inputs) - len(parameters)
        replace_seams(module, kernels, device.type)
        for name, value in zip(parameters, inputs[split:]):
            delattr(module, name)  # an attribute in a parameter's place may be any tensor
            setattr(module, name, value)
        return partial(_tupled, module if call is None else partial(call, module), *inputs[:split])

    return prepare


def both_seams(device: torch.device, *rest: Any, **more: Any) -> dict[str, Prepare]:
    """The plain seam; and on processors, where fused is not always our operator, what it is."""
    make, *others = rest
    names = {"eager": "eager"} | ({} if device.type == "cuda" else {"seam": "fused"})
    return {name: seam(make, kernels, device, *others, **more) for name, kernels in names.items()}


@lru_cache(maxsize=256)
def compiled(function: FunctionType, static: tuple[Any, ...], dynamic: bool) -> Callable[..., Any]:
    """`function(*tensors, *static)` under torch.compile; a copy of its own, which nothing compiled
    before limits.
    """
    own = FunctionType(
        function.__code__.replace(), function.__globals__, function.__name__, function.__defaults__
    )
    fast = torch.compile(own, dynamic=dynamic)
    return lambda *tensors: fast(*tensors, *static)


def _compiled(device: torch.device, function: Any, *static: Any) -> Prepare:
    # Processors' code is the same whatever the sizes; a card's is made for them.
    return plain(compiled(function, static, device.type != "cuda"))


def add_norm(
    hidden: int, tokens: int, dtype: torch.dtype, device: torch.device, case: str
) -> Contest:
    """Residual and norm."""
    centred = case == "layernorm"

    def inputs(generator: torch.Generator) -> Inputs:
        random = _random(device, dtype, generator)
        weight, bias = 1 + 0.1 * random(hidden), random(hidden) if centred else None
        return random(tokens, hidden), random(tokens, hidden), weight, bias

    tensor = tokens * hidden * dtype.itemsize
    few = tokens * 4 * (1 + centred)
    weights = hidden * dtype.itemsize * (1 + centred)
    contestants = {
        **both_seams(
            device, lambda: seams.AddNorm(case, hidden, EPSILON, bias=centred), ("weight", "bias")
        ),
        "compiled": _compiled(device, residual_norm.reference, EPSILON, centred),
        "fused": plain(lambda *inputs: residual_norm.add_norm(*inputs, EPSILON, centred)),
    }
    least = {"forward": 4 * tensor + weights + few, "backward": 4 * tensor + 2 * weights + few}
    return _contest(
        "add_norm", case, (tokens, hidden), dtype, device, inputs, contestants, least, (0, 1, 2, 3)
    )


def rotary(hidden: int, tokens: int, dtype: torch.dtype, device: torch.device) -> Contest:
    """Rotary positions of queries, and of a quarter as many keys."""
    head, batch = HEAD_DIM[device.type], 4
    heads, length = max(1, hidden // head), tokens // batch

    def inputs(generator: torch.Generator) -> Inputs:
        random = _random(device, dtype, generator)
        table = seams.rotary_positions(torch.arange(length, device=device), head, 10000.0, dtype)
        shapes = (batch, length, heads, head), (batch, length, max(1, heads // 4), head)
        return *(random(*shape) for shape in shapes), table.cos, table.sin

    def call(module: nn.Module, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
        return module(q, k, seams.Positions(cos, cos, sin))

    contestants = {
        **both_seams(device, seams.Rope, call=call),
        "compiled": _compiled(device, rope.reference),
        "fused": plain(rope.rope),
    }
    moved = (2 * tokens * (heads + max(1, heads // 4)) * head + length * head) * dtype.itemsize
    shape = (batch, length, heads, head)
    least = {"forward": moved, "backward": moved}
    return _contest("rope", "", shape, dtype, device, inputs, contestants, least, (0, 1))


ACTIVATIONS = ("swiglu", "geglu", "bias and gelu")


def activation(
    hidden: int, tokens: int, dtype: torch.dtype, device: torch.device, case: str
) -> Contest:
    """The non-linearity of a feed-forward layer four times as wide."""
    shape, biased = (tokens, 4 * hidden), case == "bias and gelu"
    kind = "gelu" if biased else case

    def inputs(generator: torch.Generator) -> Inputs:
        random = _random(device, dtype, generator)
        return random(*shape), random(shape[1]) if biased else random(*shape)

    def call(module: nn.Module, x: Tensor, other: Tensor) -> Any:
        return module(x + other, None) if biased else module(x, other)

    place = "bias" if biased else "up"
    contestants = {
        **both_seams(device, lambda: seams.Activate(kind), call=call),
        "compiled": _compiled(device, _bias_gelu if biased else GATED[kind]),
        "fused": plain(lambda x, other: act.activate(kind, x, **{place: other})),
    }
    tensor, bias = tokens * 4 * hidden * dtype.itemsize, 4 * hidden * dtype.itemsize
    least = {"forward": 2 * tensor + bias, "backward": 3 * tensor + 2 * bias}
    least = least if biased else {"forward": 3 * tensor, "backward": 5 * tensor}
    return _contest("activation", case, shape, dtype, device, inputs, contestants, least, (0, 1))


def _bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    return act.reference("gelu", x, None, bias)


def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return act.reference("swiglu", gate, up)


def _geglu(gate: Tensor, up: Tensor) -> Tensor:
    return act.reference("geglu", gate, up)


GATED = {"swiglu": _swiglu, "geglu": _geglu}


def loss(vocab: int, tokens: int, dtype: torch.dtype, device: torch.device) -> Contest:
    """Cross entropy of logits that are there."""

    def inputs(generator: torch.Generator) -> Inputs:
        targets = torch.randint(vocab, (tokens,), device=device, generator=generator)
        return _random(device, dtype, generator)(tokens, vocab), targets

    def eager(logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(
            at_least_fp32(logits), targets, reduction="sum", ignore_index=seams.IGNORE_INDEX
        )

    contestants = {
        "eager": plain(eager),
        "compiled": _compiled(device, cross_entropy.reference),
        "fused": plain(cross_entropy.cross_entropy),
    }
    tensor = tokens * vocab * dtype.itemsize
    least = {"forward": tensor, "backward": 2 * tensor}
    return _contest(
        "cross_entropy", "", (tokens, vocab), dtype, device, inputs, contestants, least, (0,)
    )


DROPOUTS = ("alone", "bias and residual")


def dropped(
    hidden: int, tokens: int, dtype: torch.dtype, device: torch.device, case: str
) -> Contest:
    """Dropout whose masks a counter draws, alone or with bias and residual. Nobody else draws these
    masks.
    """
    key, whole = 1234567, case == "bias and residual"

    def inputs(generator: torch.Generator) -> Inputs:
        random = _random(device, dtype, generator)
        rows = torch.arange(tokens, device=device) + 3 * SAMPLE_STRIDE
        more = (random(hidden), random(tokens, hidden)) if whole else (None, None)
        return random(tokens, hidden), *more, rows

    def call(
        module: nn.Module, x: Tensor, bias: Tensor | None, residual: Tensor | None, rows: Tensor
    ) -> Any:
        made = module(x if bias is None else x + bias, rows)
        return made if residual is None else residual + made

    contestants = {
        **both_seams(device, lambda: Dropout(RATE, key), call=call),
        "fused": plain(lambda *inputs: bias_dropout_residual.dropout_add(*inputs, key, RATE)),
    }
    tensor = tokens * hidden * dtype.itemsize
    least = {"forward": (2 + whole) * tensor, "backward": 2 * tensor}
    return _contest(
        "dropout", case, (tokens, hidden), dtype, device, inputs, contestants, least, (0, 1, 2)
    )


def stepped(hidden: int, dtype: torch.dtype, device: torch.device) -> Contest:
    """A step of AdamW over the matrices and norms of an attention layer, with fp32 masters."""
    shapes = [(hidden, hidden)] * 4 + [(hidden,)] * 2

    def inputs(generator: torch.Generator) -> Inputs:
        made: list[Tensor] = []
        for shape in shapes:
            master = _random(device, torch.float32, generator)(*shape)
            gradient, first = (
                _random(device, kind, generator)(*shape) for kind in (dtype, torch.float32)
            )
            second, count = first.square() + 0.01, torch.full((), 9.0, device=device)
            made += [master.to(dtype), gradient, master, first, second, count]
        return tuple(made)

    contestants: dict[str, Prepare] = {"eager": _eager_step, "compiled": _compiled_step}
    if runs_triton(device):
        contestants["fused"] = _fused_step
    entries = sum(torch.Size(shape).numel() for shape in shapes)
    least = {"step": entries * (2 * dtype.itemsize + 3 * 2 * 4)}
    return _contest("adamw", "", (4, hidden, hidden), dtype, device, inputs, contestants, least, ())


def _columns(inputs: tuple[Any, ...]) -> list[list[Tensor]]:
    """Parameters, gradients, masters, first and second moments, counts."""
    return [list(inputs[i::6]) for i in range(6)]


def _eager_step(*inputs: Tensor | None) -> Callable[[], Outputs]:
    parameters, gradients, masters, first, second, counts = _columns(inputs)

    @torch.no_grad()
    def step() -> Outputs:
        torch_adamw(
            masters,
            [x.float() for x in gradients],
            first,
            second,
            [],
            counts,
            fused=True,
            foreach=False,
            amsgrad=False,
            maximize=False,
            lr=STEP["rate"],
            weight_decay=STEP["decay"],
            beta1=STEP["beta1"],
            beta2=STEP["beta2"],
            eps=STEP["epsilon"],
        )
        for parameter, master in zip(parameters, masters):
            parameter.copy_(master)
        return tuple(masters)

    return step


def _step_of_all(columns: list[list[Tensor]]) -> None:
    for parameter, gradient, master, first, second, count in zip(*columns):
        count += 1
        first.lerp_(gradient.float(), 1 - STEP["beta1"])
        second.mul_(STEP["beta2"]).add_((1 - STEP["beta2"]) * gradient.float().square())
        deviation = (second / (1 - STEP["beta2"] ** count)).sqrt() + STEP["epsilon"]
        master.mul_(1 - STEP["rate"] * STEP["decay"]).sub_(
            STEP["rate"] * first / (1 - STEP["beta1"] ** count) / deviation
        )
        parameter.copy_(master)


def _compiled_step(*inputs: Tensor | None) -> Callable[[], Outputs]:
    columns = _columns(inputs)
    fast = compiled(_step_of_all, (), False)

    @torch.no_grad()
    def step() -> Outputs:
        fast(columns)
        return tuple(columns[2])

    return step


def _fused_step(*inputs: Tensor | None) -> Callable[[], Outputs]:
    parameters, gradients, masters, first, second, counts = _columns(inputs)
    held = zip(parameters, gradients, first, second, counts, masters)
    tensors = [adamw.AdamWTensor(*one, STEP["decay"]) for one in held]
    optimizer = adamw.FusedAdamW(tensors, STEP["beta1"], STEP["beta2"], STEP["epsilon"])

    def step() -> Outputs:
        optimizer.step(STEP["rate"])
        return tuple(masters)

    return step


WEIGHTS = ("8 bits", "4 bits", "4 bits, 8 tokens")


def decoded(hidden: int, dtype: torch.dtype, device: torch.device, case: str) -> Contest:
    """A few tokens times the weight [4 hidden, hidden] of a product. Dense is the product with the
    same weight widened, as a model has it that is not quantised.
    """
    hidden = max(hidden, min(weight_quantization.GROUPS))
    bits, tokens = int(case[0]), 8 if "8 tokens" in case else 1
    group = hidden if bits == 8 else min(128, hidden)

    def inputs(generator: torch.Generator) -> Inputs:
        random = _random(device, dtype, generator)
        weight = weight_quantization.quantize_weight(random(4 * hidden, hidden), bits, group)
        return (
            random(tokens, hidden),
            weight_quantization.dequantize_weight(weight),
            weight.values,
            weight.scales,
        )

    def of(function: Callable[..., Tensor]) -> Prepare:
        def run(x: Tensor, weight: Tensor, values: Tensor, scales: Tensor) -> Tensor:
            return function(x, weight_quantization.QuantizedWeight(values, scales, group, bits))

        return plain(run)

    contestants = {
        "eager": of(matvec_reference),
        "compiled": _compiled(device, _widened_product, group, bits),
        "dense": plain(lambda x, weight, values, scales: F.linear(x, weight)),
        "fused": of(weight_only_gemv),
    }
    scales = 4 * hidden * (hidden // group) * dtype.itemsize
    least = {
        "forward": 4 * hidden * hidden * bits // 8 + scales + tokens * 5 * hidden * dtype.itemsize
    }
    shape = (tokens, 4 * hidden, hidden)
    return _contest("matvec", case, shape, dtype, device, inputs, contestants, least, ())


def _widened_product(
    x: Tensor, weight: Tensor, values: Tensor, scales: Tensor, group: int, bits: int
) -> Tensor:
    return matvec_reference(x, weight_quantization.QuantizedWeight(values, scales, group, bits))


def _random(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> Random:
    return lambda *shape: torch.randn(shape, dtype=dtype, device=device, generator=generator)


def _contest(
    kernel: str,
    case: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    inputs: Callable[[torch.Generator], Inputs],
    contestants: dict[str, Prepare],
    least: dict[str, int],
    trained: tuple[int, ...],
) -> Contest:
    peers = liger.peers(kernel, case, device)
    direct = frozenset(peers) if (kernel, case) in liger.DIRECT else frozenset[str]()
    return Contest(
        kernel,
        f"workbench::{OPERATORS[kernel]}",
        case,
        shape,
        dtype,
        inputs,
        contestants | peers,
        least,
        trained,
        direct,
    )


OPERATORS = {
    "add_norm": "add_norm",
    "rope": "rope_",
    "activation": "activate",
    "cross_entropy": "cross_entropy_statistics",
    "dropout": "dropout_add",
    "adamw": "adamw",
    "matvec": "matvec",
}
"""Kernel -> its operator in forward."""
