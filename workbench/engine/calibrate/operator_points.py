"""Measured points of a model's operators, forward and backward under autograd, on a CPU rank.

The same modules as in a step, alone and on shapes of their own: linear layers, seams with plain and
with compiled code, the embedding, a step of ring attention, and AdamW. What Python and autograd
take is part of each figure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.adamw import adamw

from workbench.engine.calibrate.local_points import Point
from workbench.engine.calibrate.measured_sizes import CalibrationSurvey
from workbench.kernels.fused_seams import replace_seams
from workbench.machine.calibration_file import OperatorKind
from workbench.models.attention.attention_kernels import (
    AttentionBlock,
    attend_block,
    attend_block_backward,
    attention,
)
from workbench.models.grouped_gemm import GroupedLinear
from workbench.models.moe import ExpertRun, GroupedExperts, MoE, TokenDispatcher, equal_groups
from workbench.models.seams import Activate, AddNorm, HeadLoss, Rope, rotary_positions
from workbench.parallel.context.block_merging import merge_blocks
from workbench.plan.model.model_shape import Moe, Shape

Sizes = tuple[int, int, int]
Passes = Mapping[str, Callable[[], object]]
"""forward | both (forward and backward) | weight (a weight's gradient alone) -> call."""
HEAD_DIM = 32
BEYOND_CACHE_NUMEL = 2**20
"""Entries of the largest operands together that a core's own caches do not hold."""
MOST_COPIES = 12
GROUPS = 4
"""Groups of a grouped linear layer that is measured."""
CHOICES = 2
"""Experts that a token visits where routing is measured."""


def operator_points(survey: CalibrationSurvey) -> Iterator[Point]:
    """All operators that the survey names, in fp32."""
    for kind, shapes in survey.operators.items():
        for code in ("eager", "compiled") if kind in _SEAMS else ("eager",):
            for shape in shapes:
                labels: dict[str, Any] = {"kind": kind, "kernels": code}
                labels |= dict(zip(("rows", "columns", "inner"), shape))
                copies = _copies_of(kind, shape)
                for name, call in _PASSES[kind](kind, code, shape, copies).items():
                    each = copies * (GROUPS if kind == "grouped_linear" else 1)
                    yield Point("operators", {**labels, "pass": name}, call, repeats=each)


def _copies_of(kind: str, shape: Sizes) -> int:
    """As many operators of a shape one after the other as leave a core's caches, as those of a
    model's layers do; backward is started once for all of them.
    """
    rows, columns, inner = shape
    numel = max(rows * columns, rows * inner, columns * inner)
    if kind in ("attention", "ring_step"):  # [heads, length, width]
        numel = rows * columns * inner
    return max(1, min(MOST_COPIES, BEYOND_CACHE_NUMEL // numel))


def _leaf(*shape: int) -> Tensor:
    return torch.randn(shape).requires_grad_()


@dataclass(frozen=True)
class Instance:
    """One operator with operands of its own."""

    run: Callable[[], Sequence[Tensor]]
    inputs: Sequence[Tensor]
    kept: Sequence[Tensor] = ()


def _passes(make: Callable[[], Instance], copies: int) -> dict[str, Callable[[], object]]:
    """Forward, and forward and backward, of operators that `make` makes. Gradients of inputs are
    new tensors, those of what is kept add up in place, as weights' do.
    """
    made = [make() for _ in range(copies)]
    gradients = [torch.randn_like(x) for each in made for x in each.run()]
    for each in made:
        for weight in each.kept:
            weight.grad = torch.zeros_like(weight)

    def forward() -> list[Tensor]:
        return [x for each in made for x in each.run()]

    def both() -> None:
        for each in made:
            for x in each.inputs:
                x.grad = None
        torch.autograd.backward(forward(), gradients)

    return {"forward": forward, "both": both}


def _repeated(call: Callable[[], None], times: int) -> Callable[[], None]:
    def calls() -> None:
        for _ in range(times):
            call()

    return calls


def _linear(kind: str, code: str, shape: Sizes, copies: int) -> Passes:
    rows, columns, inner = shape

    def make() -> Instance:
        x, weight = _leaf(1, rows, inner), _leaf(columns, inner)
        return Instance(lambda: [F.linear(x, weight)], [x], [weight])

    operands = [
        (torch.randn(rows, columns), torch.zeros(columns, inner), torch.randn(rows, inner))
        for _ in range(copies)
    ]

    def weight_gradients() -> None:
        for gradient, total, x in operands:
            total.addmm_(gradient.t(), x)

    return {**_passes(make, copies), "weight": weight_gradients}


def _seam(module: nn.Module, code: str) -> Any:
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    replace_seams(module, code)
    return module


def _norm(kind: str, code: str, shape: Sizes, copies: int) -> Passes:
    rows, columns, _ = shape

    def make() -> Instance:
        norm = _seam(AddNorm(kind, columns, 1e-5, kind == "layernorm"), code)
        x, residual = _leaf(1, rows, columns), _leaf(1, rows, columns)
        return Instance(lambda: norm(x, residual), [x, residual], list(norm.parameters()))

    return _passes(make, copies)


def _rope(kind: str, code: str, shape: Sizes, copies: int) -> Passes:
    """Queries and keys; compiled code overwrites them, so that both work on copies."""
    rows, columns, _ = shape
    rope, width = _seam(Rope(), code), min(HEAD_DIM, columns // 2)
    positions = rotary_positions(torch.arange(rows), width, 1e4, torch.float32)

    def make() -> Instance:
        q, k = (_leaf(1, rows, columns // 2 // width, width) for _ in range(2))
        return Instance(lambda: rope(q.clone(), k.clone(), positions), [q, k])

    return _passes(make, copies)


def _copies(kind: str, code: str, shape: Sizes, copies: int) -> Passes:
    """The copies that `_rope` makes."""
    rows, columns, _ = shape

    def make() -> Instance:
        q, k = (_leaf(1, rows, columns // 2) for _ in range(2))
        return Instance(lambda: [q.clone(), k.clone()], [q, k])

    return _passes(make, copies)


def _activation(kind: str, code: str, shape: Sizes, copies: int) -> Passes:
    rows, columns, _ = shape
    activate = _seam(Activate(kind), code)

    def make() -> Instance:
        gate = _leaf(1, rows, columns)
        up = _leaf(1, rows, columns) if kind == "swiglu" else None
        return Instance(lambda: [activate(gate, up)], [gate] if up is None else [gate, up])

    return _passes(make, copies)


def _head_loss(kind: str, code: str, shape: Sizes, copies: int) -> Passes:
    rows, columns, inner = shape
    targets = torch.randint(columns, (1, rows))

    def make() -> Instance:
        head, x = _seam(HeadLoss(inner, columns), code), _leaf(1, rows, inner)
        return Instance(lambda: [head(x, targets)], [x], list(head.parameters()))

    return _passes(make, copies)


def _embedding(kind: str, code: str, shape: Sizes, copies: int) -> Passes:
    rows, columns, vocabulary = shape
    tokens = torch.randint(vocabulary, (1, rows))

    def make() -> Instance:
        table = nn.Embedding(vocabulary, columns)
        return Instance(lambda: [table(tokens)], [], list(table.parameters()))

    return _passes(make, copies)


def _grouped_linear(kind: str, code: str, shape: Sizes, copies: int) -> Passes:
    """Linear layers of several groups of rows, as of an MoE's experts."""
    rows, columns, inner = shape
    groups = equal_groups(GROUPS * rows, GROUPS, torch.device("cpu"))

    def make() -> Instance:
        layer = GroupedLinear(GROUPS, inner, columns, bias=False)
        nn.init.normal_(layer.weight)
        x = _leaf(GROUPS * rows, inner)
        return Instance(lambda: [layer(x, groups)], [x], [layer.weight])

    return _passes(make, copies)


def _routing(kind: str, code: str, shape: Sizes, copies: int) -> Passes:
    """An MoE layer whose experts return their rows as they are."""
    rows, columns, experts = shape
    moe = Moe(experts=experts, top_k=CHOICES, ffn=1)

    def make() -> Instance:
        layer = MoE(Shape(layers=1, hidden=columns, heads=1, ffn=1, vocab=1, moe=moe), None)
        for parameter in layer.parameters():
            nn.init.normal_(parameter)
        layer.dispatcher = _Returned()
        x = _leaf(1, max(1, rows // CHOICES), columns)

        def run() -> list[Tensor]:
            y, loss = layer(x)
            assert loss is not None, "a layer in training has its load-balancing loss"
            return [y, loss]

        return Instance(run, [x], [layer.route.weight])

    return _passes(make, copies)


class _Returned(TokenDispatcher):
    """Counts rows as a dispatcher does, and returns them without any expert's work."""

    def forward(self, num_rows: int, counts_E: Tensor | None, experts: GroupedExperts) -> ExpertRun:
        assert counts_E is not None, "without a capacity experts have different numbers of rows"
        self.read_counts(counts_E, num_rows)()
        return lambda x_RD: x_RD


def _attention(kind: str, code: str, shape: Sizes, copies: int) -> Passes:
    heads, length, head_dim = shape

    def make() -> Instance:
        made = [_leaf(1, length, heads, head_dim) for _ in range(3)]

        def run() -> list[Tensor]:
            q, k, v = (x.transpose(1, 2) for x in made)
            return [attention("flash", q, k, v).transpose(1, 2)]

        return Instance(run, made)

    return _passes(make, copies)


def _ring_step(kind: str, code: str, shape: Sizes, copies: int) -> Passes:
    """Attention of all queries to half of another rank's keys, merged into what there is; backward
    adds to the gradients that travel along.
    """
    heads, length, head_dim = shape
    q, k, v, gradient = (torch.randn(1, heads, length, head_dim) for _ in range(4))
    k, v = k[:, :, : length // 2], v[:, :, : length // 2]
    full = attend_block("flash", q, q, q, causal=True)

    def forward() -> None:
        block = attend_block("flash", q, k, v, causal=False)
        for into, value in zip(full, merge_blocks(full, block)):
            into.copy_(value)

    dq, travelling = torch.zeros_like(q), torch.zeros(2, *q.shape)
    whole = AttentionBlock(*(x.clone() for x in full))

    def both() -> None:
        forward()
        dq_part, dk, dv = attend_block_backward("flash", gradient, q, k, v, whole, False)
        dq.add_(dq_part)
        travelling.zero_()
        travelling[..., : length // 2, :] += torch.stack((dk, dv))

    return {"forward": _repeated(forward, copies), "both": _repeated(both, copies)}


def _adamw(kind: str, code: str, shape: Sizes, copies: int) -> Passes:
    """AdamW of one tensor, with what goes before: zeroing, norm and clipping of its gradient."""
    value, gradient, first, second, zeroed = ([torch.rand(shape[0])] for _ in range(5))
    count, scale = torch.zeros(()), torch.ones(())

    @torch.no_grad()
    def step() -> None:
        zeroed[0].zero_()  # not the gradient: moments would decay to denormal numbers
        torch._foreach_norm(gradient)
        torch._foreach_mul_(gradient, scale)
        adamw(
            value,
            gradient,
            first,
            second,
            [],
            [count],
            fused=True,
            foreach=False,
            amsgrad=False,
            maximize=False,
            beta1=0.9,
            beta2=0.95,
            lr=1e-6,
            weight_decay=0.1,
            eps=1e-8,
        )

    return {"forward": _repeated(step, copies)}


_SEAMS: tuple[OperatorKind, ...] = ("rmsnorm", "rope", "swiglu", "gelu", "head_loss")
"""Operators that compiled code may run; torch's own layernorm is never replaced on a CPU."""
_PASSES: dict[OperatorKind | Literal["copies"], Callable[[str, str, Sizes, int], Passes]] = {
    "linear": _linear,
    "rmsnorm": _norm,
    "layernorm": _norm,
    "rope": _rope,
    "copies": _copies,
    "swiglu": _activation,
    "gelu": _activation,
    "head_loss": _head_loss,
    "embedding": _embedding,
    "attention": _attention,
    "ring_step": _ring_step,
    "grouped_linear": _grouped_linear,
    "routing": _routing,
    "adamw": _adamw,
}
