"""A whole model on interpreted Triton kernels, against the plain one: every seam at once, forward
and backward.
"""

import pytest
import torch
from torch import Tensor

from tests.kernels.canaries import canaries
from workbench.kernels.fused_seams import replace_seams
from workbench.models import Transformer
from workbench.plan.model.model_shape import Shape

LLAMA = Shape(
    name="llama",
    layers=2,
    hidden=24,
    heads=3,
    kv_heads=1,
    head_dim=8,
    ffn=40,
    vocab=77,
    mlp="swiglu",
    norm="rmsnorm",
    positions="rope",
    max_positions=32,
)
GPT = Shape(
    name="gpt",
    layers=2,
    hidden=24,
    heads=3,
    kv_heads=3,
    head_dim=8,
    ffn=50,
    vocab=61,
    mlp="gelu",
    norm="layernorm",
    positions="learned",
    biases="all",
    max_positions=32,
    tied=True,
)


def gradients(shape: Shape, kernels: str) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Transformer(shape, dropout=0.25).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    replace_seams(model, kernels)
    tokens = torch.randint(0, shape.vocab, (2, 7))
    loss = model(tokens, tokens.roll(-1, 1))
    loss.backward()
    return {
        "loss": loss.detach(),
        **{n: p.grad for n, p in model.named_parameters() if p.grad is not None},
    }


@pytest.mark.parametrize("shape", [LLAMA, GPT], ids=lambda s: s.name)
def test_equals_the_plain_model(shape: Shape) -> None:
    plain = gradients(shape, "eager")
    with canaries():
        fused = gradients(shape, "fused")
    assert plain.keys() == fused.keys()
    least = 1e-6 * max(value.abs().max() for value in plain.values())  # a key bias has no gradient
    for name, value in plain.items():
        assert (fused[name] - value).abs().max() <= 1e-10 * max(value.abs().max(), least), name
