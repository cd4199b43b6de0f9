"""Compiled and fused cross entropy over a split vocabulary: loss and gradients are one device's."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.parallel.small import plan
from workbench.engine.verify.forked_ranks import run_ranks
from workbench.kernels.cross_entropy import cross_entropy
from workbench.models.seams import IGNORE_INDEX, HeadLoss
from workbench.parallel.mesh import MeshAxis, build_mesh
from workbench.parallel.tensor import tensor_collectives, vocab_parallel
from workbench.parallel.tensor.grid.grid_head import GridParallelHeadLoss
from workbench.parallel.tensor.vocab_parallel import VocabParallelHeadLoss

B, T, D = 2, 8, 12
ROOMS = {(2, 257): 130, (4, 259): 66, (4, 6): 2}
"""(Ranks, vocabulary) -> rows that each has room for; of the last, one rank has none that is real.
"""


@pytest.fixture(scope="module", autouse=True)
def compiled_once() -> None:
    """Ranks are forked from this process, and find compiled what each would else compile for
    itself.
    """
    for num_real, room in ((130, 130), (127, 130), (66, 66), (61, 66), (2, 2)):
        logits = torch.zeros(B * T, room, dtype=torch.float64).requires_grad_()
        (
            cross_entropy(logits * 1, torch.zeros(B * T, dtype=torch.long), (0, num_real)) * 0.7
        ).backward()


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def targets_of(vocab: int) -> Tensor:
    """The first entry and the last among them, and some tokens of no account."""
    targets = torch.randint(vocab, (B, T), generator=torch.Generator().manual_seed(2))
    targets[0, :4] = torch.tensor([IGNORE_INDEX, 0, vocab - 1, IGNORE_INDEX])
    return targets


def whole(vocab: int) -> list[Tensor]:
    """Loss, and the gradients of input and weight, of one device."""
    head = HeadLoss(D, vocab).double()
    with torch.no_grad():
        head.weight.copy_(3 * drawn(vocab, D, seed=1))
    x = drawn(B, T, D, seed=0).requires_grad_()
    loss = head(x, targets_of(vocab))
    return [loss.detach(), *torch.autograd.grad(loss * 0.7, (x, head.weight))]


def own(axis: MeshAxis, vocab: int) -> tuple[nn.Parameter, tuple[int, int]]:
    """This rank's rows of the weight, and which those are; what pads them would rule every
    softmax.
    """
    room = ROOMS[axis.size, vocab]
    start, stop = (min(vocab, room * (axis.index + i)) for i in (0, 1))
    weight = nn.Parameter(torch.full((room, D), 1e3, dtype=torch.float64))
    with torch.no_grad():
        weight[: stop - start] = 3 * drawn(vocab, D, seed=1)[start:stop]
    return weight, (start, stop)


def run_of(x_BTD: Tensor, axis: MeshAxis, sequence: bool) -> Tensor:
    """This rank's tokens, if they are split: a run of all in their order."""
    return x_BTD.flatten(0, 1).chunk(axis.size)[axis.index].view(B, -1, D) if sequence else x_BTD


def furthest(axis: MeshAxis, vocab: int, kernels: str, sequence: bool = False) -> float:
    """The largest difference from one device, of loss and gradients, in units of its largest
    entry.
    """
    weight, (start, stop) = own(axis, vocab)
    head = VocabParallelHeadLoss(weight, (start, stop), axis, sequence)
    head.kernels = kernels
    x = run_of(drawn(B, T, D, seed=0), axis, sequence).clone().requires_grad_()
    loss = head(x, targets_of(vocab))
    dx, dw = torch.autograd.grad(loss * 0.7, (x, weight))
    assert not dw[stop - start :].any()
    true, true_dx, true_dw = whole(vocab)
    pairs = [(loss, true), (dx, run_of(true_dx, axis, sequence))]
    pairs += [(dw[: stop - start], true_dw[start:stop])] if stop > start else []
    return max(float((mine - other).abs().max() / other.abs().max()) for mine, other in pairs)


@pytest.mark.parametrize("kernels", ["eager", "fused", "compiled"])
@pytest.mark.parametrize(("size", "vocab"), ROOMS, ids=str)
def test_equals_one_device(size: int, vocab: int, kernels: str) -> None:
    full = plan(size).resolve()
    gaps = run_ranks(size, lambda rank: furthest(build_mesh(full, rank)["tensor"], vocab, kernels))
    assert max(gaps) <= 1e-10, gaps


def test_equals_one_device_with_sequence_sharding() -> None:
    full = plan(2).resolve()
    gaps = run_ranks(
        2, lambda rank: furthest(build_mesh(full, rank)["tensor"], 257, "fused", sequence=True)
    )
    assert max(gaps) <= 1e-10, gaps


def on_a_grid(axis: MeshAxis) -> float:
    """Every rank has all tokens, and a block of the logits that some other projection has made."""
    weight, rows = own(axis, 257)
    head = GridParallelHeadLoss(weight, lambda x, w: x @ w.t(), lambda targets: targets, rows, axis)
    head.kernels = "fused"
    loss = head(drawn(B, T, D, seed=0), targets_of(257))
    (dw,) = torch.autograd.grad(loss * 0.7, weight)
    true, _, true_dw = whole(257)
    return max(
        float((loss - true).abs() / true),
        float((dw[: rows[1] - rows[0]] - true_dw[slice(*rows)]).abs().max()),
    )


def test_equals_one_device_on_a_grid() -> None:
    full = plan(2).resolve()
    gaps = run_ranks(2, lambda rank: on_a_grid(build_mesh(full, rank)["tensor"]))
    assert max(gaps) <= 1e-10, gaps


def reduced(axis: MeshAxis, kernels: str) -> list[Any]:
    """What the ranks reduce for a loss and its backward, in order."""
    calls: list[Any] = []

    def all_reduce(x: Tensor, axis: MeshAxis, op: Any = dist.ReduceOp.SUM) -> Tensor:
        calls.append((tuple(x.shape), str(x.dtype), str(op)))
        return original(x, axis, op)

    original = tensor_collectives.all_reduce
    vocab_parallel.all_reduce = all_reduce  # type: ignore[attr-defined]  # in this forked rank
    furthest(axis, 257, kernels)
    return calls


def test_fused_kernels_all_reduce_what_plain_operators_do() -> None:
    full = plan(2).resolve()

    def calls_on(kernels: str, rank: int) -> list[Any]:
        return reduced(build_mesh(full, rank)["tensor"], kernels)

    eager, fused = (run_ranks(2, partial(calls_on, kernels)) for kernels in ("eager", "fused"))
    assert eager == fused and [shape for shape, _, _ in fused[0]] == [(B * T,), (2, B * T)]


@pytest.mark.parametrize("missing", [dist.ReduceOp.MAX, dist.ReduceOp.SUM], ids=str)
def test_a_missing_reduction_is_found(monkeypatch: pytest.MonkeyPatch, missing: Any) -> None:
    def all_reduce(x: Tensor, axis: MeshAxis, op: Any = dist.ReduceOp.SUM) -> Tensor:
        return x if op == missing else original(x, axis, op)

    original = tensor_collectives.all_reduce
    monkeypatch.setattr(vocab_parallel, "all_reduce", all_reduce)
    full = plan(2).resolve()
    gaps = run_ranks(2, lambda rank: furthest(build_mesh(full, rank)["tensor"], 257, "fused"))
    assert max(gaps) > 1e-3
