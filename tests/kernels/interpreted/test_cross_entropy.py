"""Cross entropy by the interpreter, against plain operators in fp64."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.canaries import canaries
from workbench.kernels.cross_entropy import (
    BLOCK,
    cross_entropy,
    gradient_op,
    reference,
    rescale_statistics,
    statistics_op,
    token_losses,
)
from workbench.models.seams import IGNORE_INDEX

ROUNDED = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
"""How far an entry of the gradient may be by its rounding to the logits' dtype; the interpreter
cuts bf16 off.
"""


def drawn(rows: int, columns: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Logits, and targets of which the second, if there is one, is of no account."""
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    targets = torch.randint(columns, (rows,), generator=generator)
    targets[1:2] = IGNORE_INDEX
    return logits.to(dtype), targets


def results(
    logits: Tensor, targets: Tensor, incoming: float = 0.75, **form: Any
) -> tuple[Tensor, Tensor]:
    """Loss and gradient; the operator is given what lies between canaries."""
    with canaries():
        own = torch.empty(logits.shape, dtype=logits.dtype).copy_(logits).requires_grad_()
        loss = cross_entropy(own.view_as(own), targets, **form)
        (loss * incoming).backward()
    assert own.grad is not None
    return loss.detach(), own.grad


def truth(
    logits: Tensor, targets: Tensor, incoming: float = 0.75, **form: Any
) -> tuple[Tensor, Tensor]:
    own = logits.double().requires_grad_()
    loss = reference(own, targets, **form)
    return loss.detach(), torch.autograd.grad(loss * incoming, own)[0]


def assert_equal(
    found: tuple[Tensor, Tensor], true: tuple[Tensor, Tensor], dtype: torch.dtype
) -> None:
    computed = min(2e-6, ROUNDED[dtype])  # in fp32 or better, of numbers round 1
    assert (found[0] - true[0]).abs() <= computed * true[0].abs()
    assert ((found[1].double() - true[1]).abs() <= ROUNDED[dtype] * true[1].abs() + computed).all()


@pytest.mark.parametrize("dtype", ROUNDED, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (5, 33), (7, 1000), (3, 5000), (37, 40)], ids=str)
@pytest.mark.parametrize("form", [{}, {"smoothing": 0.1}, {"smoothing": 0.2, "z": 1e-3}], ids=str)
def test_equals_plain_operators(
    dtype: torch.dtype, shape: tuple[int, int], form: dict[str, float]
) -> None:
    logits, targets = drawn(*shape, dtype)
    assert_equal(results(logits, targets, **form), truth(logits, targets, **form), dtype)


def test_more_blocks_than_one() -> None:
    assert BLOCK < 5000, "a row of the tests above is to be read in several blocks"


@pytest.mark.parametrize("real", [1, 33, 2047, 2500])
def test_padding_takes_no_part(real: int) -> None:
    """Beside a row lie its padding, here no number, and what is not the operator's at all."""
    whole = torch.full((3, 2600), torch.nan)
    logits, targets = drawn(3, real, torch.float32)
    whole[:, :real] = logits
    leaf = whole.clone().requires_grad_()
    view = (leaf * 1)[:, :2550]
    loss = cross_entropy(view, targets, (0, real))
    (loss * 0.75).backward()
    assert leaf.grad is not None
    assert_equal((loss.detach(), leaf.grad[:, :real]), truth(logits, targets), torch.float32)
    assert not leaf.grad[:, real:].any()


def test_entries_beside_a_row_are_not_written() -> None:
    whole = torch.full((3, 2600), -5.0)
    logits, targets = drawn(3, 2500, torch.float32)
    whole[:, :2500] = logits
    gradient_op(
        whole[:, :2550],
        targets,
        logits.logsumexp(-1),
        torch.tensor(1.0),
        0,
        2500,
        0.0,
        0.0,
        0.0,
        "fused",
    )
    assert not whole[:, 2500:2550].any() and (whole[:, 2550:] == -5.0).all()
    assert_equal(
        (torch.ones(()), whole[:, :2500]),
        (torch.ones(()), truth(logits, targets, 1.0)[1]),
        torch.float32,
    )


@pytest.mark.parametrize("form", [(0.0, 0.0), (0.1, 1e-3)], ids=str)
def test_parts_of_a_vocabulary_add_up(form: tuple[float, float]) -> None:
    """Three parts, one without any entry; what the ranks would reduce is reduced here."""
    smoothing, z = form
    logits, targets = drawn(6, 3000)
    logits[2, :2100] = -torch.inf  # of which the first part has nothing else
    if smoothing:
        logits[2] = logits[3]
    rows = [(0, 2100), (2100, 3000), (3000, 3000)]
    room = [
        torch.nn.functional.pad(logits[:, a:b], (0, 4), value=torch.nan).contiguous()
        for a, b in rows
    ]
    with canaries():
        found = [
            statistics_op(own, targets, *r, smoothing > 0, "fused") for own, r in zip(room, rows)
        ]
    for each, (start, stop) in zip(found, rows):
        assert not each[2][
            (targets < start) | (targets >= stop)
        ].any()  # what lies there is not even read
    highest = torch.stack([each[0] for each in found]).amax(0)
    sums = sum(rescale_statistics(each, highest, targets, r) for each, r in zip(found, rows))
    assert isinstance(sums, Tensor)
    loss, lse = token_losses(sums, highest, targets, smoothing, smoothing / 3000, z)
    factor = torch.tensor(0.75, dtype=torch.float64)
    for own, (start, stop) in zip(room, rows):
        gradient_op(own, targets, lse, factor, start, stop, smoothing, smoothing / 3000, z, "fused")
        assert not own[:, stop - start :].any()
    made = torch.cat([own[:, : b - a] for own, (a, b) in zip(room, rows)], 1)
    assert_equal(
        (loss.sum(), made), truth(logits, targets, smoothing=smoothing, z=z), torch.float64
    )


def test_a_target_outside_the_vocabulary_spoils_its_token_alone() -> None:
    """And nothing outside the row is read: the rows round it are no numbers."""
    logits, targets = drawn(4, 33, torch.float32)
    targets[0], targets[3] = 33, -7
    loss, gradient = results(logits, targets)
    assert loss.isnan() and gradient[[0, 3]].isnan().all()
    targets[0] = targets[3] = IGNORE_INDEX
    assert (
        (gradient[1:3] - truth(logits, targets)[1][1:3]).abs().max()
        < 2e-6
        < gradient[2].abs().max()
    )


@pytest.mark.parametrize("value", [1.0, torch.inf, torch.nan])
def test_all_ignored(value: float) -> None:
    loss, gradient = results(torch.full((3, 40), value), torch.full((3,), IGNORE_INDEX))
    assert loss == 0 and not gradient.any()


def test_entries_that_are_infinite_or_large() -> None:
    logits, _ = drawn(4, 5000, torch.float32)
    logits[0, :4500] = -torch.inf  # two blocks of nothing else
    logits[1, 3] = torch.inf
    logits[2] *= 1e30
    logits[3] = -torch.inf
    targets = torch.tensor([4900, 5, int(logits[2].argmax()), 0])
    _, gradient = results(logits, targets)
    for row in (0, 2):
        alone = results(logits[row : row + 1], targets[row : row + 1])
        assert_equal(alone, truth(logits[row : row + 1], targets[row : row + 1]), torch.float32)
    assert not gradient[2].any() and gradient[[1, 3]].isnan().any(1).all()


def test_nothing_in_nothing_out() -> None:
    loss, gradient = results(torch.zeros(0, 16), torch.zeros(0, dtype=torch.long))
    assert loss == 0 and gradient.shape == (0, 16)


def test_rows_that_share_memory_are_copied() -> None:
    row = torch.randn(1, 50, dtype=torch.float64).requires_grad_()
    loss = cross_entropy(row.expand(3, 50), torch.tensor([1, 2, IGNORE_INDEX]))
    loss.backward()
    other = row.detach().clone().requires_grad_()
    reference(other.expand(3, 50), torch.tensor([1, 2, IGNORE_INDEX])).backward()
    assert row.grad is not None and other.grad is not None and torch.allclose(row.grad, other.grad)
