"""Context parallelism: ring attention and Ulysses equal one device and plain attention."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.parallel.small import GPT, LLAMA, plan
from tests.parallel.test_equality import assert_equal_to_one_device
from tests.parallel.test_mutations import failure_of
from workbench.engine.verify.equivalence import verify
from workbench.engine.verify.forked_ranks import run_ranks
from workbench.models.attention.attention_kernels import (
    AttentionBlock,
    attend_block,
    attend_block_backward,
)
from workbench.models.seams import Attend, Positions
from workbench.parallel.context import ring_attention, ulysses_attention
from workbench.parallel.context.apply_context import token_indices
from workbench.parallel.context.ring_attention import RingAttend
from workbench.parallel.context.ulysses_attention import UlyssesAttend
from workbench.parallel.mesh import MeshAxis
from workbench.plan.schema import Plan
from workbench.planned_device import HOST, REHEARSED_GPU
from workbench.rehearsal.fake_process_group import fake_tensors

ALGORITHMS = ["ring", "ulysses", "usp"]
NOWHERE = Positions(torch.empty(0), torch.empty(0), torch.empty(0))


def context_plan(
    context: int, algorithm: str, tensor: int = 1, pipeline: int = 1, data: int = 1, **more: Any
) -> Plan:
    made = plan(tensor, pipeline, data, **more)
    sizes = {"strategy.context": {"size": context, "algorithm": algorithm, "ulysses_size": 2}}
    return made.replace(**{"cluster.gpus": tensor * pipeline * data * context, **sizes})


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("shape", [LLAMA, GPT], ids=["llama", "gpt"])
@pytest.mark.parametrize("context", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_context_parallel_alone_equals_one_device(
    context: int, algorithm: str, shape: dict[str, Any]
) -> None:
    assert_equal_to_one_device(
        verify(context_plan(context, algorithm, shape=shape, tied=True), "fp64")
    )


@pytest.mark.slow
@pytest.mark.drawn(5)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("mesh", [(2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1)], ids=str)
def test_context_parallel_with_other_axes_equals_one_device(
    mesh: tuple[int, int, int], algorithm: str
) -> None:
    assert_equal_to_one_device(verify(context_plan(2, algorithm, *mesh), "fp64"))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(2, 1, 1), (1, 2, 1), (1, 1, 2)], ids=str)
def test_usp_equals_one_device_beside_other_axes(mesh: tuple[int, int, int]) -> None:
    """Pairs of Ulysses on a ring of two."""
    assert_equal_to_one_device(verify(context_plan(4, "usp", *mesh), "fp64"))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_context_parallel_equals_one_device_in_fp32(algorithm: str) -> None:
    assert_equal_to_one_device(verify(context_plan(2, algorithm), "fp32"))


def sub_axes(
    ranks: int, rank: int, num_ulysses: int, connected: bool = False
) -> tuple[MeshAxis, MeshAxis]:
    """(ring, ulysses) of a rank; `connected`, with process groups."""
    grid = torch.arange(ranks).view(-1, num_ulysses)
    found = []
    for name, groups in (("context.ring", grid.T.tolist()), ("context.ulysses", grid.tolist())):
        made = [dist.new_group(group) if connected else None for group in groups]
        own = next(i for i, group in enumerate(groups) if rank in group)
        mine = tuple(groups[own])
        found.append(MeshAxis(name, len(mine), mine.index(rank), mine, made[own]))
    return found[0], found[1]


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("heads", [(12, 12), (12, 6), (12, 1)], ids=str)
def test_ring_and_ulysses_equal_plain_attention(
    heads: tuple[int, int], algorithm: str, ranks: int
) -> None:
    length, generator = 8 * 3, torch.Generator().manual_seed(0)
    q, k, v, weight = (
        torch.randn(2, length, n, 8, generator=generator, dtype=torch.float64)
        for n in (*heads, heads[1], heads[0])
    )
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = Attend()(*inputs, NOWHERE)
    (expected * weight).sum().backward()

    num_ulysses = {"ring": 1, "ulysses": ranks, "usp": 2 if ranks == 4 else ranks}[algorithm]

    def work(rank: int) -> list[Any]:
        ring, ulysses = sub_axes(ranks, rank, num_ulysses, connected=True)
        attend: Any = RingAttend(ring) if ring.size > 1 else Attend()
        if ulysses.size > 1:
            attend = UlyssesAttend(attend, ulysses)
        mine = token_indices(length, ring, ulysses, torch.device("cpu"))
        local = [x[:, mine].clone().requires_grad_() for x in (q, k, v)]
        out = attend(*local, NOWHERE)
        (out * weight[:, mine]).sum().backward()
        return [x.numpy() for x in (out.detach(), *(x.grad for x in local if x.grad is not None))]

    found = run_ranks(ranks, work)
    places = [
        token_indices(length, *sub_axes(ranks, r, num_ulysses), torch.device("cpu"))
        for r in range(ranks)
    ]
    assert torch.equal(torch.cat(places).sort().values, torch.arange(length))
    for got, want in zip(zip(*found), [expected.detach(), *(x.grad for x in inputs)]):
        whole = torch.zeros_like(want)
        for part, place in zip(got, places):
            whole[:, place] = torch.from_numpy(part)
        torch.testing.assert_close(whole, want, rtol=0, atol=1e-12)


def test_repeated_gqa_heads_change_no_number() -> None:
    """As for a GPU whose operator takes one key-value head for each query head."""
    generator = torch.Generator().manual_seed(0)
    sizes = (12, 3, 3)
    inputs = [
        torch.randn(2, 24, n, 8, generator=generator, dtype=torch.float64, requires_grad=True)
        for n in sizes
    ]
    weight = torch.randn(2, 24, 12, 8, generator=generator, dtype=torch.float64)
    plain, repeating = Attend(), Attend()
    repeating.kernel = "efficient"
    outs = [attend(*inputs, NOWHERE) for attend in (plain, repeating)]
    gradients = [torch.autograd.grad((out * weight).sum(), inputs) for out in outs]
    for one, other in zip((outs[0], *gradients[0]), (outs[1], *gradients[1])):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_bf16_ring_attention_merges_blocks_in_fp32() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 64, 2, 8, generator=generator) for _ in range(3))
    exact_q, exact_k, exact_v = (x.bfloat16().double().transpose(1, 2) for x in (q, k, v))
    exact = F.scaled_dot_product_attention(exact_q, exact_k, exact_v, is_causal=True)

    def work(rank: int) -> float:
        ring, ulysses = sub_axes(4, rank, 1, connected=True)
        mine = token_indices(64, ring, ulysses, torch.device("cpu"))
        out = RingAttend(ring)(*(x[:, mine].bfloat16() for x in (q, k, v)), NOWHERE)
        return float((out.double() - exact.transpose(1, 2)[:, mine]).abs().max())

    assert max(run_ranks(4, work)) < 2 * torch.finfo(torch.bfloat16).eps


def test_a_rank_that_does_not_merge_received_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring_attention, "merge_blocks", lambda first, second: first)
    assert failure_of(verify(context_plan(2, "ring")))["tensor"]


def test_heads_returned_to_the_wrong_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    original = ulysses_attention._gather_heads
    monkeypatch.setattr(
        ulysses_attention, "_gather_heads", lambda x, axis: original(x.flip(1), axis)
    )
    assert failure_of(verify(context_plan(2, "ulysses")))["tensor"]


def test_keys_of_later_tokens_that_are_not_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    original = attend_block
    monkeypatch.setattr(
        ring_attention,
        "attend_block",
        lambda kernel, q, k, v, causal, **more: original(kernel, q, k, v, False, **more),
    )
    assert failure_of(verify(context_plan(2, "ring")))["tensor"]


@pytest.mark.parametrize(
    ("axis", "algorithm"), [("ring", "ring"), ("ring", "usp"), ("ulysses", "usp")]
)
def test_positions_of_another_rank(
    monkeypatch: pytest.MonkeyPatch, axis: str, algorithm: str
) -> None:
    from workbench.parallel.context import apply_context

    def first_rank(ring: MeshAxis, ulysses: MeshAxis, length: int, x: Tensor) -> Tensor:
        axes = {"ring": ring, "ulysses": ulysses}
        axes[axis] = replace(axes[axis], index=0)
        return token_indices(length, *axes.values(), x.device)

    monkeypatch.setattr(apply_context, "_indices_like", first_rank)
    assert failure_of(verify(context_plan(2 if algorithm == "ring" else 4, algorithm)))["tensor"]


class RecordedLse(TorchDispatchMode):
    """Records the log-sum-exp that attention operators are given in backward, on any device."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        names = [a.name for a in func._schema.arguments]
        if "logsumexp" in names and "backward" in func.__name__:
            self.tensors.append(args[names.index("logsumexp")])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("device", "kernel", "dtype"),
    [
        (HOST, "flash", torch.float32),
        (REHEARSED_GPU, "flash", torch.bfloat16),
        (REHEARSED_GPU, "efficient", torch.float32),
    ],
    ids=str,
)
@pytest.mark.parametrize("length", [6, 128])
def test_backward_passes_a_packed_lse_to_the_kernel(
    device: torch.device, kernel: str, dtype: torch.dtype, length: int
) -> None:
    """CUDA's kernels index it as packed [B, H, T] whatever its strides."""
    half = slice(length // 2, None)  # as ring attention takes the second half of the queries
    with fake_tensors(), RecordedLse() as recorded:
        q, out, gradient = (
            torch.zeros(2, 4, length, 8, device=device, dtype=dtype) for _ in range(3)
        )
        k, v = (torch.zeros(2, 2, length, 8, device=device, dtype=dtype) for _ in range(2))
        lse = torch.zeros(2, 4, length, device=device)
        full = AttentionBlock(out[:, :, half], lse[:, :, half])
        attend_block_backward(kernel, gradient[:, :, half], q[:, :, half], k, v, full, causal=False)
    assert len(recorded.tensors) == 1
    assert recorded.tensors[0].is_contiguous()
