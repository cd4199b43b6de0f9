"""Attention, whole and sliced as ring attention slices it, against fp64."""

from __future__ import annotations

import gc
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.gpu.checks import Check, Evidence, relative_gap
from workbench.models.attention.attention_kernels import (
    AttentionBlock,
    attend_block,
    attend_block_backward,
    attention,
    repeat_heads,
)

BATCH, HEAD_DIM = 2, 64
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
"""Of the largest entry of a result or gradient."""


@dataclass(frozen=True)
class Case:
    """Heads, key-value heads, tokens and dtype of an attention."""

    heads: int
    groups: int
    tokens: int
    dtype: torch.dtype

    @property
    def kernel(self) -> str:
        """What `strategy.attention: auto` is for the dtype."""
        return "efficient" if self.dtype == torch.float32 else "flash"

    def inputs(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries, keys, values and the output's gradient, [B, H, T, K]."""
        generator = torch.Generator().manual_seed(0)
        q, k, v, gradient = (
            torch.randn(BATCH, heads, self.tokens, HEAD_DIM, generator=generator)
            for heads in (self.heads, self.groups, self.groups, self.heads)
        )
        return tuple(x.to(device, self.dtype) for x in (q, k, v, gradient))  # type: ignore[return-value]


CASES = {
    f"{kind}, {tokens} tokens, {str(dtype).removeprefix('torch.')}": Case(8, groups, tokens, dtype)
    for dtype in TOLERANCE
    for kind, groups in (("MHA", 8), ("GQA", 2))
    for tokens in (256, 250)  # a multiple of 32, and one that is none
}


def exact(q: Tensor, k: Tensor, v: Tensor, gradient: Tensor, hidden: Tensor) -> tuple[Tensor, ...]:
    """Output, LSE and gradients by plain operators in fp64; `hidden` [T, S] masks keys."""
    own = [x.detach().double().cpu().requires_grad_() for x in (q, k, v)]
    repeats = q.shape[1] // k.shape[1]
    keys, values = (x.repeat_interleave(repeats, dim=1) for x in own[1:])
    scores = own[0] @ keys.transpose(-1, -2) / HEAD_DIM**0.5
    scores = scores.masked_fill(hidden, -torch.inf)
    out, lse = scores.softmax(-1) @ values, scores.logsumexp(-1)
    gradients = torch.autograd.grad(out, own, gradient.double().cpu())
    return out.detach(), lse.detach(), *gradients


def causal_mask(tokens: int) -> Tensor:
    """[T, T], true where a key is after its query."""
    return torch.ones(tokens, tokens, dtype=torch.bool).triu(1)


def whole(case: Case, evidence: Evidence) -> None:
    """Causal attention of all queries, forward and backward."""
    q, k, v, gradient = case.inputs(evidence.device)
    block = attend_block(case.kernel, q, k, v, causal=True)
    gradients = attend_block_backward(case.kernel, gradient, q, k, v, block, causal=True)
    truth = exact(q, k, v, gradient, causal_mask(case.tokens))
    compare("whole", (*block, *gradients), truth, case, evidence)


def sliced(case: Case, evidence: Evidence) -> None:
    """The second half of the queries to one block of keys, as a ring's later rank: slices of the
    gradient, the output and its LSE are views that are not contiguous.
    """
    q, k, v, gradient = case.inputs(evidence.device)
    half = case.tokens // 2
    hidden = torch.zeros(case.tokens, case.tokens, dtype=torch.bool)
    full = attend_block(case.kernel, q, k, v, causal=False)
    late = slice(half, None)
    part = AttentionBlock(*(x[:, :, late] for x in full))
    found = attend_block_backward(
        case.kernel, gradient[:, :, late], q[:, :, late], k, v, part, causal=False
    )
    truth = exact(q[:, :, late], k, v, gradient[:, :, late], hidden[late])
    compare("sliced", (*part, *found), truth, case, evidence)


def compare(
    kind: str, found: tuple[Tensor, ...], truth: tuple[Tensor, ...], case: Case, evidence: Evidence
) -> None:
    for name, mine, true in zip(("output", "LSE", "dq", "dk", "dv"), found, truth, strict=True):
        gap = relative_gap(mine, true)
        evidence.expect(f"{kind}: {name}", gap <= TOLERANCE[case.dtype], gap=gap)


def both(case: Case, evidence: Evidence) -> None:
    """Whole and sliced."""
    whole(case, evidence)
    sliced(case, evidence)


class _KernelsRun(TorchDispatchMode):
    """Names of the attention operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "scaled_dot_product" in str(func):
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def kernel_and_bytes(case: Case, evidence: Evidence) -> None:
    """Which kernel runs, and the bytes that forward and backward allocate."""
    case = replace(case, tokens=128) if evidence.dry else case
    q, k, v, gradient = (x.requires_grad_() for x in case.inputs(evidence.device))
    if case.kernel != "flash":
        k, v = (repeat_heads(x, case.heads) for x in (k, v))
    with _KernelsRun() as run:
        attention(case.kernel, q, k, v)
    fused = bool(run.names) and not any("math" in name for name in run.names)
    evidence.expect("a fused kernel runs", fused, names=run.names)
    planned, no_scores = "the planned kernel runs", "no scores [B, H, T, T] are kept"
    if not evidence.on_gpu(
        "a CPU has one kernel, and torch's allocator is CUDA's", planned, no_scores
    ):
        return
    evidence.expect(planned, f"_{case.kernel}_attention" in run.names[0], names=run.names)
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    attention(case.kernel, q, k, v).backward(gradient)
    peak = torch.cuda.max_memory_allocated() - before
    scores = BATCH * case.heads * case.tokens**2 * q.element_size()
    evidence.measured("peak bytes", peak)
    evidence.expect(no_scores, peak < scores, peak=peak, scores=scores)


LONG = {
    f"kernel: {kind}, {str(dtype).removeprefix('torch.')}": Case(8, groups, 4096, dtype)
    for dtype in TOLERANCE
    for kind, groups in (("MHA", 8), ("GQA", 2))
}

CHECKS = [
    *(Check(name, partial(both, case), 30) for name, case in CASES.items()),
    *(Check(name, partial(kernel_and_bytes, case), 30) for name, case in LONG.items()),
]
