"""AdamW of many tensors by the interpreter, against plain operators in fp64 and torch's fused
AdamW.
"""

import pytest
import torch
from torch import Tensor
from torch.optim.adamw import adamw as torch_adamw

from workbench.engine.optimizer.mixed_precision_optimizer import MixedPrecisionOptimizer
from workbench.kernels.adamw import AdamWTensor, FusedAdamW, reference
from workbench.parallel.layout import Layout
from workbench.plan import schema

RATE, BETAS, EPSILON, DECAY, SCALE = 1e-2, (0.9, 0.95), 1e-8, 0.1, 0.7
SIZES = (1, 7, 1000, 4097, 0, 2048)
GUARD = 64


def between_canaries(x: Tensor, offset: int = 0) -> Tensor:
    """`x` in the middle of a buffer of canaries, `offset` entries from where it would be
    aligned.
    """
    buffer = torch.full((x.numel() + 2 * GUARD,), -7777.0, dtype=x.dtype)
    held = buffer[GUARD + offset :][: x.numel()].view(x.shape)
    return held.copy_(x)


def intact(x: Tensor) -> bool:
    """Whether nothing was written round `x`."""
    buffer = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())
    before, after = buffer[: x.storage_offset()], buffer[x.storage_offset() + x.numel() :]
    return (
        bool((before == -7777).all() and (after == -7777).all())
        and len(before) + len(after) == 2 * GUARD
    )


def drawn(
    sizes: tuple[int, ...],
    dtype: torch.dtype,
    gradient: torch.dtype,
    moment: torch.dtype,
    master: bool,
    offset: int = 0,
) -> list[AdamWTensor]:
    """A tensor of each size; every other one is decayed."""
    generator = torch.Generator().manual_seed(0)
    own = []
    for i, size in enumerate(sizes):
        value = torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)
        held = [value, *(torch.zeros(size, dtype=d) for d in (gradient, moment, moment))]
        parts = [between_canaries(x, offset) for x in held]
        wide = between_canaries(parts[0].float(), offset) if master else None
        own.append(AdamWTensor(*parts, torch.zeros(()), wide, DECAY * (i % 2)))
    return own


def gradients(own: list[AdamWTensor], step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for x in own:
        x.gradient.copy_(torch.randn(x.gradient.shape, generator=generator, dtype=torch.float64))


def target(x: AdamWTensor) -> Tensor:
    return x.parameter if x.master is None else x.master


def rounded(mine: Tensor, wide: Tensor) -> bool:
    """Whether `mine` is `wide` in its dtype: the nearest, but that the interpreter cuts off what
    bf16 has no room for, and that in fp32 a sum may come out on the other side of the middle.
    """
    unit = {torch.bfloat16: 1.001, torch.float16: 0.501}.get(mine.dtype, 2.0) * torch.finfo(
        mine.dtype
    ).eps
    return bool((mine.double() - wide.double()).abs().le(wide.double().abs() * unit + 1e-7).all())


NARROW, WIDE, WIDEST = torch.bfloat16, torch.float32, torch.float64
KINDS = {
    "fp64": (WIDEST, WIDEST, WIDEST, False),
    "fp32": (WIDE, WIDE, WIDE, False),
    "fp32, narrow gradients": (WIDE, NARROW, WIDE, False),
    "bf16 with masters": (NARROW, NARROW, WIDE, True),
    "bf16 with masters, wide gradients": (NARROW, WIDE, WIDE, True),
    "fp16 with masters": (torch.float16, torch.float16, WIDE, True),
}
"""Dtypes of parameter, gradient and moments, and whether there are masters."""


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_plain_operators_in_fp64(kind: str, offset: int) -> None:
    own = drawn(SIZES, *KINDS[kind], offset)
    true = [
        (target(x).to(WIDEST, copy=True), *[torch.zeros(x.parameter.shape, dtype=WIDEST)] * 2)
        for x in own
    ]
    optimizer = FusedAdamW(own, *BETAS, EPSILON)
    for step in range(3):
        gradients(own, step)
        given = [x.gradient.clone() for x in own]
        optimizer.step(RATE, torch.tensor(SCALE, dtype=WIDEST))
        true = [
            reference(p, g.double() * SCALE, m, v, step + 1, RATE, *BETAS, EPSILON, x.decay)
            for x, (p, m, v), g in zip(own, true, given)
        ]
        for x, expected, g in zip(own, true, given):
            for mine, his in zip((target(x), x.moment1, x.moment2), expected):
                # Some roundings of what is as large as the largest entry.
                assert mine.dtype == KINDS[kind][2]
                torch.testing.assert_close(
                    mine.double(), his, rtol=0, atol=6 * torch.finfo(mine.dtype).eps
                )
            assert torch.equal(x.gradient, g) and rounded(x.parameter, target(x))
            assert x.steps == step + 1
            assert all(intact(y) for y in x if isinstance(y, Tensor) and y.ndim)


@pytest.mark.parametrize("kind", ["fp32", "fp64"])
def test_forty_tensors_are_stepped_as_torchs_fused_kernel_does(kind: str) -> None:
    own = drawn((*range(1, 39), 1025, 130), *KINDS[kind])
    theirs = [
        [x.clone() for x in (y.parameter, y.gradient, y.moment1, y.moment2, y.steps)] for y in own
    ]
    optimizer = FusedAdamW(own, *BETAS, EPSILON)
    assert len(optimizer._launches) == 1
    for step in range(3):
        gradients(own, step)
        optimizer.step(RATE)
        for decay in (0.0, DECAY):
            group = [[*x[:1], y.gradient, *x[2:]] for x, y in zip(theirs, own) if y.decay == decay]
            p, g, m, v, steps = map(list, zip(*group))
            torch_adamw(
                p,
                g,
                m,
                v,
                [],
                steps,
                fused=True,
                foreach=False,
                amsgrad=False,
                maximize=False,
                lr=RATE,
                weight_decay=decay,
                beta1=BETAS[0],
                beta2=BETAS[1],
                eps=EPSILON,
            )
    for y, (parameter, _, moment1, moment2, count) in zip(own, theirs):
        eps = torch.finfo(parameter.dtype).eps
        for mine, his in ((y.parameter, parameter), (y.moment1, moment1), (y.moment2, moment2)):
            torch.testing.assert_close(mine, his, rtol=4 * eps, atol=eps)
        assert y.steps == count == 3


@pytest.mark.parametrize("master", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bit_state_is_the_fp32_update_rounded(dtype: torch.dtype, master: bool) -> None:
    own = drawn((7, 1030), dtype, dtype, torch.bfloat16, master)
    optimizer = FusedAdamW(own, *BETAS, EPSILON)
    for step in range(3):
        gradients(own, step)
        before = [
            [y.to(WIDE, copy=True) for y in (target(x), x.gradient, x.moment1, x.moment2)]
            for x in own
        ]
        optimizer.step(RATE)
        for x, (p, g, m, v) in zip(own, before):
            true = reference(p, g, m, v, step + 1, RATE, *BETAS, EPSILON, x.decay)
            for mine, his in zip((target(x), x.moment1, x.moment2), true):
                assert rounded(mine, his)
            assert rounded(x.parameter, target(x))


def test_a_skipped_step_changes_nothing_whatever_the_gradients() -> None:
    own = drawn((5, 1025), *KINDS["bf16 with masters"])
    optimizer = FusedAdamW(own, *BETAS, EPSILON)
    gradients(own, 0)
    optimizer.step(RATE, None, torch.zeros(()))
    before = [
        [y.clone() for y in (x.parameter, x.moment1, x.moment2, x.steps, target(x))] for x in own
    ]
    for value in (float("nan"), float("inf")):
        for x in own:
            x.gradient.fill_(value)
        optimizer.step(RATE, torch.tensor(value), torch.ones(()))
    for x, kept in zip(own, before):
        mine = x.parameter, x.moment1, x.moment2, x.steps, target(x)
        assert x.gradient.isinf().all() and all(map(torch.equal, mine, kept))
    assert all(x.steps == 1 for x in own)


def test_storages_that_move_are_found_and_those_that_are_freed_refused() -> None:
    own = drawn((5, 1025), *KINDS["bf16 with masters"])
    fixed = drawn((5, 1025), *KINDS["bf16 with masters"])
    optimizer, other = FusedAdamW(own, *BETAS, EPSILON), FusedAdamW(fixed, *BETAS, EPSILON)
    old = []
    for step in range(3):
        for x in own:
            for y in (x.parameter, x.gradient, x.moment1, target(x)):
                old.append((y.detach(), y.clone()))
                y.set_(y.clone())  # type: ignore[call-overload]
        gradients(own, step)
        gradients(fixed, step)
        optimizer.step(RATE)
        other.step(RATE)
        assert all(torch.equal(x.parameter, y.parameter) for x, y in zip(own, fixed))
    assert all(torch.equal(x, y) for x, y in old)
    storage = own[1].gradient.untyped_storage()
    storage.resize_(0)
    with pytest.raises(
        ValueError, match=r"adamw: the storage of a tensor of shape \(1025,\) is freed"
    ):
        optimizer.step(RATE)
    assert all(x.steps == 3 for x in own)
    storage.resize_(1025 * 2)
    gradients(own, 3)
    optimizer.step(RATE)


@pytest.mark.parametrize("dtype", [WIDE, torch.float16], ids=str)
def test_an_optimizer_of_fused_kernels_steps_as_one_of_torchs(dtype: torch.dtype) -> None:
    shapes = {"matrix": (33, 40), "bias": (11,), "norm": (7,)}
    layouts = {name: Layout.unsharded(name, shape) for name, shape in shapes.items()}
    config = schema.Optimizer(learning_rate=RATE, warmup_steps=2)
    found = []
    for kernels in ("eager", "fused"):
        generator = torch.Generator().manual_seed(0)
        own, given = (
            {n: torch.randn(s, generator=generator).to(dtype) for n, s in shapes.items()}
            for _ in range(2)
        )
        optimizer = MixedPrecisionOptimizer(own, given, layouts, config, 10, kernels)
        assert (optimizer._fused is None) == (kernels == "eager")
        for step in range(4):
            for x in given.values():
                x.copy_(torch.randn(x.shape, generator=generator))
            optimizer.step(step, torch.tensor(SCALE), torch.tensor(float(step == 2)))
        found.append(
            [*own.values(), *(x for state in optimizer.state().values() for x in state.values())]
        )
    for eager, fused in zip(*found, strict=True):
        eps = torch.finfo(eager.dtype).eps
        torch.testing.assert_close(fused, eager, rtol=4 * eps, atol=4 * torch.finfo(WIDE).eps)
    assert all(x == 3 for x in found[1] if x.ndim == 0)


def test_tensors_that_the_kernel_does_not_support_take_torchs_path() -> None:
    shapes = {"matrix": (6, 4)}
    layouts = {name: Layout.unsharded(name, shape) for name, shape in shapes.items()}
    whole = {"matrix": torch.zeros(6, 4)}
    turned = {"matrix": torch.zeros(4, 6).t()}
    assert (
        MixedPrecisionOptimizer(whole, whole, layouts, schema.Optimizer(), 1, "fused")._fused
        is not None
    )
    for given, config in ((whole, schema.Optimizer(name="sgd")), (turned, schema.Optimizer())):
        optimizer = MixedPrecisionOptimizer(
            given, {"matrix": given["matrix"].clone() + 1}, layouts, config, 1, "fused"
        )
        optimizer.step(0)
        assert optimizer._fused is None and given["matrix"].all()
