"""A model as a user would write it: plain, of torch's own modules, knowing nothing of this
repository.
"""

import torch
from torch import Tensor, nn


class LanguageModel(nn.Module):
    """A causal language model of `nn.TransformerEncoderLayer`s."""

    places: Tensor

    def __init__(
        self, vocab: int, width: int, heads: int, layers: int, longest: int, norm_first: bool
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.register_buffer("places", torch.randn(longest, width) * 0.1)
        layer = nn.TransformerEncoderLayer(
            width,
            heads,
            4 * width,
            dropout=0.0,
            activation="gelu",
            batch_first=True,
            norm_first=norm_first,
        )
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, vocab)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, dtype=self.places.dtype)
        x = self.tokens(tokens) + self.places[:length]
        logits: Tensor = self.output(self.norm(self.encoder(x, mask=mask, is_causal=True)))
        return logits


def build(width: int = 32, heads: int = 4, norm_first: bool = True) -> nn.Module:
    """The factory that a plan names."""
    return LanguageModel(260, width, heads, 2, 64, norm_first)


class WithLoss(nn.Module):
    """The same, returning the loss; its targets are viewed, as nanoGPT does."""

    def __init__(self, reduction: str) -> None:
        super().__init__()
        self.model, self.reduction = build(), reduction

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = self.model(tokens)
        return nn.functional.cross_entropy(
            logits.view(-1, logits.size(-1)), targets.view(-1), reduction=self.reduction
        )


def build_with_loss(reduction: str = "sum") -> nn.Module:
    return WithLoss(reduction)


def build_with_channel_dropout() -> nn.Module:
    model = build()
    assert isinstance(model, LanguageModel)
    model.encoder.layers[0].dropout = nn.Dropout1d(0.1)
    return model


def frozen() -> nn.Module:
    model = build()
    model.get_parameter("output.weight").requires_grad_(False)
    return model


def failing() -> nn.Module:
    raise ValueError("no such size")


def no_module() -> int:
    return 1


class PlainBlocks(nn.Module):
    """Linear layers initialised as users do: by modules, by `nn.init`, and by arithmetic."""

    inverse: Tensor

    def __init__(self, vocab: int, width: int, layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.register_buffer("inverse", 1.0 / 10.0 ** torch.arange(0, width))
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.shift = nn.Parameter(torch.randn(3, width) * 0.5 + 2.0)
        self.scale = nn.Parameter(torch.ones(width))
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, vocab, bias=False)
        nn.init.normal_(self.output.weight, 0.25, 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) * self.scale + self.shift.sum(0) + self.inverse
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        logits: Tensor = self.output(self.norm(x))
        return logits


def build_plain(width: int = 32, layers: int = 2, vocab: int = 260) -> nn.Module:
    return PlainBlocks(vocab, width, layers)


class Uncalled(PlainBlocks):
    """The head's weight is used, its module is not called."""

    def forward(self, tokens: Tensor) -> Tensor:
        return nn.functional.linear(self.norm(self.tokens(tokens)), self.output.weight)


def build_uncalled() -> nn.Module:
    return Uncalled(260, 32, 0)


class RotatedConvolution(nn.Module):
    """Rotated as pairs by complex numbers, then a causal convolution of groups."""

    def __init__(self, width: int = 32, groups: int = 4) -> None:
        super().__init__()
        self.tokens = nn.Embedding(260, width)
        angles = torch.outer(torch.arange(64), 0.1 ** torch.arange(width // 2))
        self.rotation = torch.polar(torch.ones_like(angles), angles)  # no buffer
        self.query = nn.Linear(width, width)
        self.convolution = nn.Conv1d(width, width, 4, groups=groups)
        self.output = nn.Linear(width, 260)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.query(self.tokens(tokens))
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        turned = torch.view_as_real(pairs * self.rotation[: tokens.shape[1]]).flatten(2).type_as(x)
        mixed = self.convolution(nn.functional.pad(turned.mT, (3, 0)))
        logits: Tensor = self.output(x + mixed.mT)
        return logits


def build_rotated() -> nn.Module:
    return RotatedConvolution()
