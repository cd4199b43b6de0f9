"""An MoE layer equals one written here token by token, in double precision; what is
dropped, and balance.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from workbench.models import Transformer
from workbench.models.host_counts import balanced_counts, recomputation_contexts
from workbench.models.moe import MoE
from workbench.models.moe_routing import capacity_rows, dropless_rows
from workbench.plan.model.model_shape import Moe, Shape, rows_of_an_expert
from workbench.plan.model.parameter_count import parameters

SHAPE: dict[str, Any] = {"layers": 2, "hidden": 12, "heads": 2, "ffn": 20, "vocab": 257}
MOE: dict[str, Any] = {"experts": 4, "top_k": 2, "ffn": 8}
BATCH, TIME = 3, 10


def shape_of(moe: dict[str, Any], **more: Any) -> Shape:
    return Shape.model_validate({**SHAPE, **more, "moe": {**MOE, **moe}})


def moe_layer_of(shape: Shape) -> MoE:
    """In double precision, with weights so large that nothing vanishes, biases included."""
    model = Transformer(shape).double()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(noise / math.sqrt(parameter.shape[-1]) + 0.1)
    moe_layer = model.blocks["1"].mlp
    assert isinstance(moe_layer, MoE)
    return moe_layer


def inputs() -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(
        BATCH, TIME, SHAPE["hidden"], generator=generator, dtype=torch.float64
    ).requires_grad_()


def visit(shape: Shape, part: nn.Module, expert: int | None, x: Tensor) -> Tensor:
    """One token through one expert, or through the shared ones."""

    def linear(name: str, x: Tensor) -> Tensor:
        layer = getattr(part, name)
        weight, bias = (
            p if p is None or expert is None else p[expert] for p in (layer.weight, layer.bias)
        )
        output: Tensor = weight @ x if bias is None else weight @ x + bias
        return output

    up = linear("up", x)
    gelu = nn.functional.gelu(up, approximate="tanh")
    return linear("down", nn.functional.silu(linear("gate", x)) * up if shape.gated else gelu)


def choices(moe: Moe, moe_layer: MoE, scores_E: Tensor) -> list[int]:
    """Experts of a token, best first."""
    bias = moe_layer.route.bias
    wanted = (scores_E if bias is None else scores_E + bias).tolist()
    legal = list(range(moe.experts))
    if moe.groups and moe.top_groups:
        size, best = moe.experts // moe.groups, 1 if bias is None else 2
        groups = [range(i, i + size) for i in range(0, moe.experts, size)]
        groups.sort(key=lambda own: -sum(sorted(wanted[e] for e in own)[-best:]))
        legal = [e for own in groups[: moe.top_groups] for e in own]
    return sorted(legal, key=lambda e: -wanted[e])[: moe.top_k]


def oracle(shape: Shape, moe_layer: MoE, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
    """(branch, auxiliary loss), token by token."""
    moe = shape.moe
    assert moe is not None
    branch, balance = torch.zeros_like(x_BTD), torch.zeros((), dtype=x_BTD.dtype)
    for b in range(BATCH):
        logits = x_BTD[b] @ moe_layer.route.weight.T
        scores = logits.softmax(1) if moe.scores == "softmax" else logits.sigmoid()
        chosen = [choices(moe, moe_layer, own) for own in scores]
        room = dict.fromkeys(
            range(moe.experts), rows_of_an_expert(TIME, moe) if moe.capacity else TIME * moe.top_k
        )
        for choice in range(moe.top_k):
            for t in range(TIME):
                expert = chosen[t][choice]
                gate = scores[t, expert] / (
                    sum(scores[t, e] for e in chosen[t]) if moe.renormalise else 1
                )
                gate = gate * moe.scale
                if room[expert]:
                    room[expert] -= 1
                    branch[b, t] += gate * visit(shape, moe_layer.experts, expert, x_BTD[b, t])
        scores = scores / scores.sum(1, keepdim=True)
        for expert in range(moe.experts):
            share = sum(expert in own for own in chosen) / (moe.top_k * TIME) * moe.experts
            balance = balance + moe.auxiliary_loss * TIME * share * scores[:, expert].mean()
    if moe_layer.shared is not None:
        branch = branch + torch.stack(
            [visit(shape, moe_layer.shared, None, x) for x in x_BTD.flatten(0, 1)]
        ).view_as(x_BTD)
    return branch, balance


EIGHT = {"experts": 8, "top_k": 3}
CASES = [
    ({}, {}),
    ({"top_k": 1}, {}),
    ({"renormalise": False, "top_k": 3}, {}),
    ({"shared": 2}, {}),
    ({"capacity": 1.0}, {}),
    ({"capacity": 0.3, "top_k": 1}, {}),
    ({"capacity": 4.0, "shared": 1}, {}),
    ({"shared": 1}, {"biases": "all", "mlp": "gelu"}),
    ({"capacity": 0.7}, {"biases": "all"}),
    ({"groups": 4, "top_groups": 2, "scale": 16.0, "renormalise": False, **EIGHT}, {}),
    ({"groups": 4, "top_groups": 2, "score_bias": True, "scores": "sigmoid", **EIGHT}, {}),
    ({"score_bias": True, "scores": "sigmoid", "scale": 2.5, "top_k": 3}, {}),
]


@pytest.mark.parametrize(("moe", "more"), CASES, ids=str)
def test_moe_equals_a_loop_over_tokens(moe: dict[str, Any], more: dict[str, Any]) -> None:
    shape = shape_of({"auxiliary_loss": 0.5, **moe}, **more)
    moe_layer, x = moe_layer_of(shape), inputs()
    results = []
    for function in (moe_layer, lambda x: oracle(shape, moe_layer, x)):
        branch, auxiliary = function(x)
        wanted = [x, *moe_layer.parameters()]
        weights = torch.linspace(-1, 1, branch.numel(), dtype=branch.dtype).view_as(branch)
        loss = (branch * weights).sum() + auxiliary
        gradients = torch.autograd.grad(loss, wanted, materialize_grads=True)
        results.append([branch, auxiliary, *gradients])
    for mine, expected in zip(*results):
        torch.testing.assert_close(mine, expected, rtol=1e-10, atol=1e-12)


def test_choices_over_capacity_are_dropped_first_choices_last() -> None:
    moe = Moe(
        experts=2, top_k=2, ffn=8, capacity=0.5
    )  # 2 rows of the 4 that each expert is chosen for
    experts_BTK = torch.tensor([[[0, 1], [0, 1], [0, 1], [1, 0]]])
    rows = capacity_rows(experts_BTK, moe)
    assert rows.kept_NK is not None
    assert rows.kept_NK.tolist() == [[True, True], [True, False], [False, False], [True, False]]
    assert rows.tokens_R.tolist() == [0, 1, 3, 0]


def test_nothing_is_dropped_without_a_capacity() -> None:
    experts_BTK = torch.randint(4, (BATCH, TIME, 2), generator=torch.Generator().manual_seed(1))
    rows = dropless_rows(experts_BTK, 4)
    assert (
        rows.counts_E is not None
        and int(rows.counts_E.sum()) == rows.tokens_R.numel() == BATCH * TIME * 2
    )
    assert (experts_BTK.flatten()[rows.rows_NK.flatten().argsort()].diff() >= 0).all()
    assert (rows.tokens_R[rows.rows_NK] == torch.arange(BATCH * TIME)[:, None]).all()


def test_capacity_and_aux_loss_are_per_sequence() -> None:
    """The same whether it comes alone or with others: nothing depends on how sequences are
    dealt.
    """
    moe_layer, x = moe_layer_of(shape_of({"capacity": 0.8, "auxiliary_loss": 1.0})), inputs()
    together, total = moe_layer(x)
    alone = [moe_layer(one[None]) for one in x]
    torch.testing.assert_close(
        together, torch.cat([branch for branch, _ in alone]), rtol=1e-12, atol=1e-12
    )
    torch.testing.assert_close(total, sum(loss for _, loss in alone), rtol=1e-12, atol=1e-12)


def test_an_even_router_has_the_least_auxiliary_loss() -> None:
    shape = shape_of({"auxiliary_loss": 0.25, "top_k": 1})
    moe_layer, x = moe_layer_of(shape), inputs()
    with torch.no_grad():
        moe_layer.route.weight.zero_()
    assert moe_layer(x)[1].item() == pytest.approx(0.25 * BATCH * TIME)


def test_evaluation_has_no_auxiliary_loss() -> None:
    moe_layer = moe_layer_of(shape_of({})).eval()
    assert moe_layer(inputs())[1] is None


def test_router_scores_are_fp32_and_their_gradients_are_not_lost() -> None:
    moe_layer = moe_layer_of(shape_of({})).bfloat16()
    x = inputs().detach().bfloat16().requires_grad_()
    choice = moe_layer.route(x)
    exact = (x.float() @ moe_layer.route.weight.float().T).softmax(-1)
    expected = exact.topk(2)
    assert torch.equal(choice.experts_BTK, expected.indices)
    branch, auxiliary = moe_layer(x)
    (branch.float().sum() + auxiliary).backward()
    assert (
        moe_layer.route.weight.grad is not None
        and moe_layer.route.weight.grad.dtype == torch.bfloat16
    )


@pytest.mark.parametrize("capacity", [None, 1.0])
def test_a_recomputed_layer_chooses_the_experts_of_its_forward(capacity: float | None) -> None:
    """Activations that are recomputed may differ in their last bits, and near ties then flip."""
    moe_layer, x = moe_layer_of(shape_of({"capacity": capacity})), inputs()
    with torch.no_grad():
        moe_layer.route.weight.mul_(1e-9)  # near ties alone
    calls = []

    def flip_the_second_time(_: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        calls.append(1)
        return (args[0] * (1 if len(calls) == 1 else -1),)

    def gradients(run: Callable[[Tensor], Any]) -> dict[str, Tensor]:
        moe_layer.zero_grad()
        output, _ = run(x)
        (output * torch.linspace(0, 1, output.numel()).view_as(output)).sum().backward()
        return {
            name: parameter.grad.clone()
            for name, parameter in moe_layer.experts.named_parameters()
            if parameter.grad is not None
        }

    expected = gradients(moe_layer)
    moe_layer.route.register_forward_pre_hook(flip_the_second_time)
    recomputed = partial(
        checkpoint, moe_layer, use_reentrant=False, context_fn=recomputation_contexts
    )
    found = gradients(recomputed)
    assert len(calls) == 2 and found.keys() == expected.keys()
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_counts_without_values_are_even() -> None:
    assert balanced_counts(torch.zeros(4), 10)() == [3, 3, 2, 2]
    assert balanced_counts(torch.zeros(2, 4), 8, 1, 2)() == [[2, 2, 2, 2]] * 2
    sent, received = zip(*(balanced_counts(torch.zeros(2, 4), 10, i, 2)() for i in range(2)))
    assert sent == ([3, 3, 2, 2], [3, 3, 2, 2]) and received == ([3, 3, 3, 3], [2, 2, 2, 2])


@pytest.mark.parametrize("biases", ["none", "all"])
def test_moe_parameters_are_counted(biases: str) -> None:
    shape = shape_of({"shared": 2, "first_dense": 1}, biases=biases)
    assert sum(p.numel() for p in Transformer(shape).parameters()) == parameters(shape).total


def test_one_gate_is_not_divided_by_itself() -> None:
    assert Moe(experts=4, top_k=2, ffn=8).renormalise
    assert not Moe(experts=4, top_k=1, ffn=8).renormalise
