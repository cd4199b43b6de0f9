"""Layer profiles: what blocks take on a device whose clock the test owns, and what they hold."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.engine.fake_cuda import FakeAllocator, FakeStream
from workbench.engine.layer_times.backward_memory import PeakStamps, backward_bytes
from workbench.engine.layer_times.block_clock import BlockClock, DeviceClock
from workbench.engine.layer_times.block_trace import BlockTrace
from workbench.engine.layer_times.measure import measure_layers
from workbench.engine.layer_times.model_blocks import block_parameters, model_blocks
from workbench.errors import PlanError
from workbench.plan.model.layer_profile_csv import read_layer_profile, write_layer_profile
from workbench.plan.model.parameter_count import parameters
from workbench.plan.schema import build_plan
from workbench.runs.measure.profile_layers import single_device_plan


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> FakeStream:
    return FakeStream().install(monkeypatch)


class Timed(torch.autograd.Function):
    """Doubles, and takes the stream's time both ways."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, run: Callable[[float], None], f: float, b: float) -> Tensor:
        ctx.run, ctx.b = run, b
        ctx.save_for_backward(x)  # checkpointing recomputes up to what was saved last
        run(f)
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        assert ctx.saved_tensors
        ctx.run(ctx.b)
        return 2 * gradient, None, None, None


class Work(nn.Module):
    """A block of so many seconds forward and backward."""

    def __init__(self, stream: FakeStream, f: float, b: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.stream, self.f, self.b = stream, f, b

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = Timed.apply(x * self.weight, self.stream.run, self.f, self.b)
        return out


class Chain(nn.Module):
    """An embedding, a residual stream with work between its blocks, and a loss."""

    def __init__(self, stream: FakeStream) -> None:
        super().__init__()
        self.tokens = nn.Embedding(5, 4)
        self.blocks = nn.ModuleList([Work(stream, 3, 5), Work(stream, 7, 11)])
        self.head = Work(stream, 1, 2)
        self.stream = stream

    def forward(self, tokens: Tensor) -> Tensor:
        self.stream.run(100)
        x = self.tokens(tokens)
        for block in self.blocks:
            x = x + Timed.apply(block(x), self.stream.run, 20, 30)
        out: Tensor = Timed.apply(self.head(x), self.stream.run, 200, 300)
        return out.sum()


class Shared(nn.Module):
    """Two readers of one tensor; the first is called again behind the second."""

    def __init__(self, stream: FakeStream) -> None:
        super().__init__()
        self.first, self.second = Work(stream, 1, 10), Work(stream, 2, 20)
        self.last = Work(stream, 3, 30)

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.first.weight
        a, b = self.first(x), self.second(x)
        out: Tensor = self.last(self.first(a + b))
        return out.sum()


class Wrapped(nn.Module):
    """A block within another, recomputed in backward."""

    def __init__(self, stream: FakeStream) -> None:
        super().__init__()
        self.outer, self.inner = Work(stream, 1, 10), Work(stream, 2, 20)

    def forward(self, x: Tensor) -> Tensor:
        x = self.outer(x)
        out: Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return out.sum()


def seconds(
    model: nn.Module, tokens: Tensor
) -> tuple[list[str], dict[str, float], dict[str, float]]:
    """Names, and seconds of forward and backward, of the blocks of a model."""
    blocks = model_blocks(model)
    clock = BlockClock(blocks, DeviceClock(torch.device("cuda")))
    with clock.watching():
        forward, backward = clock.times(lambda: model(tokens))
    names = [block.name for block in blocks]
    return names, dict(zip(names, forward)), dict(zip(names, backward))


def trace(model: nn.Module, tokens: Tensor) -> BlockTrace:
    found = BlockTrace(model_blocks(model), model)
    found.run(lambda: model(tokens))
    return found


TOKENS = torch.tensor([[0, 1, 2]])
NUMBERS = torch.ones(3, 4)


def test_blocks_take_their_time_and_what_follows_them(stream: FakeStream) -> None:
    names, forward, backward = seconds(Chain(stream), TOKENS)
    assert names == ["tokens", "blocks.0", "blocks.1", "head"]
    assert forward == {"tokens": 100, "blocks.0": 23, "blocks.1": 27, "head": 201}
    assert backward == {"tokens": 0, "blocks.0": 35, "blocks.1": 41, "head": 302}


def test_readers_of_one_tensor_are_distinguished_and_calls_summed(stream: FakeStream) -> None:
    _, forward, backward = seconds(Shared(stream), NUMBERS)
    assert forward == {"first": 2, "second": 2, "last": 3}
    assert backward == {"first": 20, "second": 20, "last": 30}


def test_recomputation_is_backward(stream: FakeStream) -> None:
    _, forward, backward = seconds(Wrapped(stream), NUMBERS)
    assert forward == {"outer": 1, "inner": 2}
    assert backward == {"outer": 10, "inner": 2 + 20}


def test_hooks_are_gone_afterwards(stream: FakeStream) -> None:
    model = Chain(stream)
    seconds(model, TOKENS)
    trace(model, TOKENS)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_the_sum_crosses_a_residual_stream(stream: FakeStream) -> None:
    """3 tokens of 4 numbers: each block gives on one tensor, whatever it adds to it."""
    found = trace(Chain(stream), TOKENS)
    assert found.output_bytes == [48] * 4
    assert found.reads == [set(), {0}, {1}, {2}]


def test_what_is_read_twice_is_an_output_once(stream: FakeStream) -> None:
    found = trace(Shared(stream), NUMBERS)
    assert found.order == [0, 1, 2]
    assert found.reads == [set(), {0}, {0}]
    # of first: what both read (made before it), and its two outputs; of second: the sum
    assert found.output_bytes == [3 * 48, 48, 48]


def test_parameters_count_once_and_lone_ones_with_the_first_block(stream: FakeStream) -> None:
    model = Chain(stream)
    model.head.weight = model.blocks[0].weight  # type: ignore[assignment]
    model.lone = nn.Parameter(torch.ones(2))
    own, tied = block_parameters(model, model_blocks(model))
    assert own == [5 * 16 + 8, 16, 16, 0] and tied == [{}, {}, {}, {1: 16}]


def test_a_parameter_of_three_blocks_is_tied_to_the_last_before(stream: FakeStream) -> None:
    model = Chain(stream)
    model.tokens.weight = model.blocks[0].weight  # type: ignore[assignment]
    model.head.weight = model.blocks[0].weight  # type: ignore[assignment]
    own, tied = block_parameters(model, model_blocks(model))
    assert own == [16, 0, 16, 0] and tied == [{}, {0: 16}, {}, {1: 16}]


class Wide(nn.Module):
    """Two blocks of a tensor each, whose backward needs eight and one more."""

    class Block(nn.Module):
        """Keeps its input, and recomputes eight times as much."""

        def __init__(self, times: int) -> None:
            super().__init__()
            self.weight, self.times = nn.Parameter(torch.ones(1000)), times

        def forward(self, x: Tensor) -> Tensor:
            """[1000] -> [1000]."""
            out: Tensor = checkpoint(self._wide, x * self.weight, use_reentrant=False)
            return out

        def _wide(self, x: Tensor) -> Tensor:
            return (x.expand(self.times, -1) * 2).square().sum(0)

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Wide.Block(8), Wide.Block(1)

    def forward(self, x: Tensor) -> Tensor:
        """[1000] -> a number."""
        out: Tensor = self.second(self.first(x)).sum()
        return out


def test_backward_needs_more_than_is_kept() -> None:
    """Of 8 x 4000 bytes that are recomputed, backward holds several: what it reads, the gradient
    and what that is made of, by how torch computes it.
    """
    model, x = Wide(), torch.ones(1000)
    found, device = trace(model, x), torch.device("cpu")
    held = [*model.parameters(), x]
    needs = backward_bytes(found.blocks, found, lambda: model(x), held, device, [{}, {}])
    assert 3 * 32_000 <= needs[0] <= 5 * 32_000
    assert 3 * 4_000 <= needs[1] <= 8 * 4_000


def test_peaks_between_stamps_are_the_allocators_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = FakeAllocator().install(monkeypatch)
    memory.allocate(900)
    memory.allocate(-800)
    stamps = PeakStamps(torch.device("cuda"), [])
    begin = stamps.stamp()
    memory.allocate(50)
    memory.allocate(-20)
    middle = stamps.stamp()
    memory.allocate(10)
    end = stamps.stamp()
    peaks = [stamps.peak(*each) for each in ((begin, middle), (middle, end), (begin, end))]
    assert stamps.base == 100 and peaks == [150, 140, 150]


def test_modules_that_hold_lists_are_opened(stream: FakeStream) -> None:
    model = nn.Module()
    model.body, model.plain = Chain(stream), nn.Linear(2, 2)
    names = [block.name for block in model_blocks(model)]
    assert names == ["body.tokens", "body.blocks.0", "body.blocks.1", "body.head", "plain"]
    with pytest.raises(PlanError, match=r"builds a Linear without submodules"):
        model_blocks(nn.Linear(2, 2))


def plan(**changes: Any) -> Any:
    written = {
        "model": {"layers": 2, "hidden": 32, "heads": 4, "ffn": 64, "vocab": 260, "tied": True},
        "cluster": {"gpu": "local", "gpus": 1},
        "strategy": {"precision": "fp32"},
        "training": {"global_batch": 8, "micro_batch": 2, "sequence_length": 16},
    }
    return build_plan(written).replace(**changes)


def measured(**changes: Any) -> Any:
    full = single_device_plan(plan(**changes).resolve())
    return measure_layers(full, 0.0, lambda done, words: None)


@pytest.mark.parametrize(("changes", "kept"), [({}, 1.0), ({"strategy.recompute": "full"}, 0.3)])
def test_layers_of_a_plan(changes: dict[str, Any], kept: float, tmp_path: Path) -> None:
    profile = measured(**changes)
    assert [layer.name for layer in profile.layers] == ["embedding", "layer_0", "layer_1", "head"]
    assert [layer.inputs for layer in profile.layers] == [(), ("node0",), ("node1",), ("node2",)]
    assert all(layer.forward_s > 0 and layer.backward_s > 0 for layer in profile.layers)
    assert {layer.activation_bytes for layer in profile.layers} == {2 * 16 * 32 * 4}
    full = plan(**changes).resolve()
    assert profile.parameters[-1] == 4 * parameters(full.shape).total
    table = 260 * 32 * 4
    assert profile.layers[0].parameter_bytes == table  # tied: not the head's
    assert [layer.tied for layer in profile.layers] == [(), (), (), (("node0", table),)]
    assert (profile.profile_batch, profile.sequence_length) == (2, 16)
    assert profile.precision == "fp32" and "torch" in profile.source
    assert profile.layers[1].kept_bytes <= kept * measured().layers[1].kept_bytes
    write_layer_profile(profile, tmp_path / "layers.csv")
    again = read_layer_profile(tmp_path / "layers.csv")
    assert again.kept == pytest.approx(profile.kept) and again.ties == profile.ties


def test_parallelism_does_not_matter() -> None:
    many = plan(**{"cluster.gpus": 4, "strategy.pipeline.size": 2, "strategy.data.zero": 1})
    single = single_device_plan(many.resolve())
    assert single.world_size == 1 and single.strategy.data.zero == 0
    assert single.training.micro_batch == 2 and single.num_microbatches == 1
    assert single.strategy.pipeline.partition == [2]


def users(factory: str) -> dict[str, Any]:
    return {"model": {"python": f"tests.parallel.users_model:{factory}", "vocab": 260}}


def test_a_users_module() -> None:
    profile = measured(**users("build_plain"))
    names = ["tokens", "blocks.0", "blocks.1", "norm", "output"]
    assert [layer.name for layer in profile.layers] == names
    assert [layer.inputs for layer in profile.layers[1:]] == [(f"node{i}",) for i in range(4)]
    assert {layer.activation_bytes for layer in profile.layers[:4]} == {2 * 16 * 32 * 4}


def test_a_submodule_that_is_not_called_is_refused() -> None:
    with pytest.raises(PlanError, match=r"has the submodule 'output', which its forward does not"):
        measured(**users("build_uncalled"))


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("raises", r"its forward raised RuntimeError: boom \(wrong_models.py:\d+\); legal"),
        ("exits", r"its forward raised SystemExit: 0 \(wrong_models.py:\d+\); legal"),
        ("backward", r"its backward raised ArithmeticError: no gradient \(wrong_models.py:\d+\)"),
        ("tuple", r"its forward returns a tuple; legal: logits \[2, 16, 260\], or of forward"),
        ("none", r"its forward returns None; legal: logits"),
        ("hidden", r"its forward returns a tensor \[2, 16, 8\]; legal: logits \[2, 16, 260\]"),
        ("losses", r"its forward returns a tensor \[2\]; legal: the summed loss, one number"),
        ("detaches", r"has the submodule 'tokens', whose parameters get no gradient of the loss"),
    ],
)
def test_what_a_users_module_does_wrong_is_named(fault: str, said: str) -> None:
    code = {"python": "tests.engine.wrong_models:build", "vocab": 260, "args": {"fault": fault}}
    with pytest.raises(PlanError, match=f"^model.python: {said}"):
        measured(model=code)
