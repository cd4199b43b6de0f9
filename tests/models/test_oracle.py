"""The model equals a second one, written here from the papers with other operators, in double
precision.

Attention as einsum over repeated key-value heads with an explicit mask, rotary positions as complex
numbers, norms and softmax from their definitions.
"""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from workbench.models import Transformer
from workbench.models.seams import IGNORE_INDEX
from workbench.models.weight_init import initial_value
from workbench.plan.model.model_shape import Shape

LLAMA: dict[str, Any] = {
    "layers": 3,
    "hidden": 24,
    "heads": 6,
    "kv_heads": 2,
    "ffn": 40,
    "vocab": 257,
}
GPT: dict[str, Any] = {
    "layers": 3,
    "hidden": 24,
    "heads": 4,
    "ffn": 64,
    "vocab": 257,
    "norm": "layernorm",
    "mlp": "gelu",
    "positions": "learned",
    "biases": "all",
    "max_positions": 16,
    "tied": True,
}
SHAPES = {
    "llama": LLAMA,
    "gpt": GPT,
    "embedding norm": {**LLAMA, "embedding_norm": True},
    "geglu, qkv biases": {
        **LLAMA,
        "mlp": "geglu",
        "biases": "qkv",
        "norm": "layernorm",
        "rope_theta": 500.0,
    },
    "relu, wide heads": {**GPT, "mlp": "relu", "head_dim": 10, "tied": False},
}
BATCH, TIME = 2, 11


def built(written: dict[str, Any]) -> Transformer:
    """In double precision, with weights so large that nothing vanishes, biases and norms
    included.
    """
    model = Transformer(Shape.model_validate(written)).double()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(
                noise / math.sqrt(parameter.shape[-1]) if parameter.ndim > 1 else 1 + noise / 3
            )
    return model


def text(vocab: int = 257) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(vocab, (BATCH, TIME + 1), generator=torch.Generator().manual_seed(5))
    targets = tokens[:, 1:].clone()
    targets[0, :3] = IGNORE_INDEX
    return tokens[:, :-1], targets


def oracle(shape: Shape, w: dict[str, Tensor], tokens: Tensor, targets: Tensor) -> Tensor:
    x = w["embedding.tokens.weight"][tokens]
    if shape.positions == "learned":
        x = x + w["embedding.positions.weight"][: tokens.shape[1]]
    if shape.embedding_norm:
        x = normed(shape, w, "embedding.norm", x)
    for i in range(shape.layers):
        x = x + attention(
            shape, w, f"blocks.{i}.attention", normed(shape, w, f"blocks.{i}.attention_norm", x)
        )
        x = x + feed_forward(
            shape, w, f"blocks.{i}.mlp", normed(shape, w, f"blocks.{i}.mlp_norm", x)
        )
    head = w.get("head.weight", w["embedding.tokens.weight"])
    logits = normed(shape, w, "final_norm", x) @ head.T
    probabilities = logits.exp() / logits.exp().sum(-1, keepdim=True)
    valid = targets != IGNORE_INDEX
    chosen = probabilities.gather(-1, targets.where(valid, 0)[..., None])[..., 0]
    return -chosen.log()[valid].sum()


def normed(shape: Shape, w: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    if shape.norm == "rmsnorm":
        return (
            w[f"{name}.weight"] * x / (x.pow(2).mean(-1, keepdim=True) + shape.norm_epsilon).sqrt()
        )
    centred = x - x.mean(-1, keepdim=True)
    scale = (centred.pow(2).mean(-1, keepdim=True) + shape.norm_epsilon).sqrt()
    return w[f"{name}.weight"] * centred / scale + w[f"{name}.bias"]


def linear(w: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    y = torch.einsum("btd,fd->btf", x, w[f"{name}.weight"])
    return y + w[f"{name}.bias"] if f"{name}.bias" in w else y


def attention(shape: Shape, w: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    width = int(shape.head_dim or 0)
    q, k, v = (linear(w, f"{name}.{part}", x).reshape(*x.shape[:2], -1, width) for part in "qkv")
    if shape.positions == "rope":
        q, k = turned(q, shape.rope_theta), turned(k, shape.rope_theta)
    k, v = (torch.stack([y] * (q.shape[2] // y.shape[2]), dim=3).flatten(2, 3) for y in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(width)
    future = torch.arange(x.shape[1])[:, None] < torch.arange(x.shape[1])
    weights = scores.masked_fill(future, -math.inf).exp()
    weights = weights / weights.sum(-1, keepdim=True)
    return linear(w, f"{name}.o", torch.einsum("bhqk,bkhd->bqhd", weights, v).flatten(2))


def turned(x: Tensor, theta: float) -> Tensor:
    half = x.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = torch.arange(x.shape[1], dtype=torch.float64)[:, None, None] * frequencies
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(
        torch.ones_like(angles), angles
    )
    return torch.cat((turned.real, turned.imag), dim=-1)


def feed_forward(shape: Shape, w: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    inside = linear(w, f"{name}.gate" if shape.gated else f"{name}.up", x)
    if shape.mlp == "swiglu":
        h = inside / (1 + (-inside).exp())
    elif shape.mlp == "relu":
        h = inside.clamp(min=0)
    else:  # the tanh form of GELU (Hendrycks and Gimpel 2016), as GPT-2 has it
        h = inside / 2 * (1 + (math.sqrt(2 / math.pi) * (inside + 0.044715 * inside**3)).tanh())
    return linear(w, f"{name}.down", h * linear(w, f"{name}.up", x) if shape.gated else h)


@pytest.mark.parametrize("written", SHAPES.values(), ids=SHAPES)
def test_loss_and_every_gradient_equal_the_oracle(written: dict[str, Any]) -> None:
    model, (tokens, targets) = built(written), text()
    loss = model(tokens, targets)
    loss.backward()
    w = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    expected = oracle(model.shape, w, tokens, targets)
    expected.backward()
    assert abs(loss.item() / expected.item() - 1) < 1e-12
    largest = max(float(x.grad.abs().max()) for x in w.values() if x.grad is not None)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(
            parameter.grad, w[name].grad, rtol=0, atol=1e-12 * largest, msg=name
        )


@pytest.mark.parametrize("written", [LLAMA, GPT], ids=["llama", "gpt"])
def test_a_loss_does_not_see_later_tokens(written: dict[str, Any]) -> None:
    model, (tokens, targets) = built(written), text()
    place, losses, embedded = 5, [], []

    def retain(module: Any, inputs: Any, x: Tensor) -> None:
        embedded.append(x)
        x.retain_grad()

    assert model.embedding is not None
    model.embedding.register_forward_hook(retain)
    early = targets.clone()
    early[:, place:] = IGNORE_INDEX
    for change in (0, 1):
        changed = tokens.clone()
        changed[:, place:] = (changed[:, place:] + change) % 257
        losses.append(model(changed, early))
    assert torch.equal(losses[0], losses[1])
    losses[0].backward()
    gradient = embedded[0].grad
    assert gradient is not None
    assert gradient[:, place:].abs().max() == 0 and gradient[:, :place].abs().amin((0, 2)).min() > 0


@pytest.mark.parametrize("written", [LLAMA, GPT], ids=["llama", "gpt"])
def test_the_first_loss_is_that_of_a_uniform_guess(written: dict[str, Any]) -> None:
    model = Transformer(Shape.model_validate({**written, "hidden": 96}))
    initialise(model, seed=0)
    tokens = torch.randint(257, (40, 17), generator=torch.Generator().manual_seed(5))
    loss = model(tokens[:, :-1], tokens[:, 1:]).item() / (40 * 16)
    assert loss == pytest.approx(math.log(257), rel=0.01)


def initialise(model: Transformer, seed: int) -> None:
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(initial_value(name, tuple(p.shape), model.shape.layers, seed, p.dtype))


def drawn(name: str, shape: tuple[int, ...] = (300, 200), layers: int = 8, seed: int = 0) -> Tensor:
    return initial_value(name, shape, layers, seed, torch.float32)


def test_initial_weights_depend_on_name_and_seed_alone() -> None:
    first = drawn("blocks.1.mlp.up.weight")
    torch.manual_seed(99)
    torch.randn(7)
    assert torch.equal(first, drawn("blocks.1.mlp.up.weight", layers=3))
    assert not torch.equal(first, drawn("blocks.2.mlp.up.weight"))
    assert not torch.equal(first, drawn("blocks.1.mlp.up.weight", seed=1))
    state = torch.get_rng_state()
    drawn("blocks.1.mlp.up.weight")
    assert torch.equal(state, torch.get_rng_state())


def test_initial_weights_have_their_standard_deviation() -> None:
    assert drawn("head.weight").std().item() == pytest.approx(0.02, rel=0.02)
    assert drawn("blocks.0.mlp.down.weight").std().item() == pytest.approx(0.02 / 4, rel=0.02)
    assert drawn("blocks.0.attention.o.weight").std().item() == pytest.approx(0.02 / 4, rel=0.02)
    assert drawn("blocks.0.attention_norm.weight", (8,)).eq(1).all()
    assert (
        drawn("blocks.0.attention_norm.bias", (8,)).eq(0).all()
        and drawn("head.bias", (8,)).eq(0).all()
    )


def test_a_rounded_draw_is_the_rounded_fp32_draw() -> None:
    bf16 = initial_value("head.weight", (300, 200), 8, 0, torch.bfloat16)
    assert torch.equal(bf16, drawn("head.weight").bfloat16())
