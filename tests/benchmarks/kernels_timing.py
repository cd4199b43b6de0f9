"""How contestants are timed: all in one run, in turn, each over its own copies of the same inputs.

On a card forward and backward of every contestant are captured as CUDA graphs, so that no host's
delay is in them, and replayed over enough copies of the inputs that none is in the L2 cache when
its turn comes. On a processor the time is CPU seconds of this process, which has one thread.
Medians of all rounds.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

Inputs = tuple[Tensor | None, ...]
Outputs = tuple[Tensor, ...]
Prepare = Callable[..., Callable[[], Outputs]]
"""Inputs -> what is timed. What may be slow, such as building tables, belongs before its return."""
Seconds = dict[str, float]
"""By pass: forward and backward, or the one that there is."""

CACHES = 4
"""Copies of the inputs together are this many times as large as the card's L2 cache."""
MOST_COPIES = 64
ROUNDS = {"cuda": 25, "cpu": 9}
WHOLE_ROUNDS = {"cuda": 12, "cpu": 27}
"""Of a whole layer or step, in which what differs is a small part."""
COPIED = {"cuda": 2**30, "cpu": 2**27}
"""Bytes of the tensor whose copying tells the bandwidth."""
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 4e-2}
"""What ours may differ from eager operators in fp32 by, of the largest value: a wrong kernel is not
timed.
"""


@dataclass(frozen=True)
class Contest:
    """One operator at one shape. `trained` are the places of the inputs that have gradients, if
    any; `least` has the bytes that must be moved, by pass; `direct` are contestants that wait for
    the card, which no graph can hold.
    """

    kernel: str
    operator: str
    case: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    inputs: Callable[[torch.Generator], Inputs]
    contestants: dict[str, Prepare]
    least: dict[str, int]
    trained: tuple[int, ...] = ()
    direct: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        """In words."""
        words = (
            self.kernel,
            self.case,
            str(list(self.shape)),
            str(self.dtype).removeprefix("torch."),
        )
        return " ".join(word for word in words if word)

    @property
    def width(self) -> int:
        """Of a row: what a token has, its heads together."""
        return math.prod(self.shape[2:]) if len(self.shape) == 4 else self.shape[-1]

    def between(self, *names: str) -> Contest:
        """The same of those contestants alone that have one of the names."""
        return replace(
            self, contestants={name: own for name, own in self.contestants.items() if name in names}
        )


class _Alias(torch.autograd.Function):
    """The same storage, but no leaf: operators in place may have it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


@dataclass
class Runner:
    """One contestant and its copies of the inputs, so that what works in place spoils nobody's."""

    contest: Contest
    prepare: Prepare
    sources: list[Inputs]
    own: list[Inputs] = field(default_factory=list)
    incoming: list[list[Tensor]] = field(default_factory=list)
    ready: list[Callable[[], Outputs]] = field(default_factory=list)
    made: list[Outputs] = field(default_factory=list)
    gradients: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        for source in self.sources:
            copies = [None if x is None else x.clone() for x in source]
            for i in self.contest.trained:
                copies[i] = None if copies[i] is None else copies[i].requires_grad_()
            self.own.append(tuple(copies))

    def restore(self) -> None:
        """Every input as it was at first."""
        pairs = [
            (a, b)
            for own, source in zip(self.own, self.sources)
            for a, b in zip(own, source)
            if a is not None and b is not None
        ]
        with torch.no_grad():
            for dtype in {a.dtype for a, _ in pairs}:
                same = [(a, b) for a, b in pairs if a.dtype == dtype]
                torch._foreach_copy_([a for a, _ in same], [b for _, b in same])

    def arrange(self) -> None:
        """What comes before the time starts. Without gradients once is enough: then nothing is kept
        for backward.
        """
        if self.contest.trained or not self.ready:
            self.ready = [self.prepare(*map(_usable, own)) for own in self.own]

    def forward(self) -> None:
        """Over every copy; results are held, as a model holds them."""
        self.made = [run() for run in self.ready]

    def backward(self) -> None:
        """Over every copy."""
        self.gradients = [
            torch.autograd.grad(
                made, [own[i] for i in self.contest.trained if own[i] is not None], incoming
            )
            for made, own, incoming in zip(self.made, self.own, self.incoming)
        ]

    def first(self) -> None:
        """Once through all, which compiles what is to be compiled, and tells what gradients come
        in.
        """
        self.arrange()
        self.forward()
        if self.contest.trained:
            if not self.incoming:
                generator = torch.Generator(self.made[0][0].device).manual_seed(1)
                self.incoming = [[_like(x, generator) for x in made] for made in self.made]
            self.backward()

    def results(self) -> list[Tensor]:
        """Of the first copy: results and gradients."""
        found = [*self.made[0], *(self.gradients[0] if self.gradients else ())]
        return [x.detach().clone() for x in found]

    def clear(self) -> None:
        """Hold no results any more."""
        self.made, self.gradients = [], []
        self.ready = [] if self.contest.trained else self.ready


def _usable(x: Tensor | None) -> Tensor | None:
    return _Alias.apply(x) if x is not None and x.requires_grad else x


def _like(x: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(x.shape, dtype=x.dtype, device=x.device, generator=generator)


def race(contest: Contest, device: torch.device) -> tuple[dict[str, Seconds], dict[str, float]]:
    """Contestant -> seconds of each pass; contestant -> how far it is off (`errors`). Raises
    ArithmeticError where ours is wrong.
    """
    generator = torch.Generator(device).manual_seed(0)
    first = contest.inputs(generator)
    size = bytes_of(*first)
    sources = [first, *(contest.inputs(generator) for _ in range(copies(device, size) - 1))]
    runners = {
        name: Runner(contest, prepare, sources) for name, prepare in contest.contestants.items()
    }
    off = errors(contest, runners)
    if not off["fused"] <= TOLERANCE[contest.dtype]:
        raise ArithmeticError(
            f"{contest.name}: {off['fused']:.1e} off, more than {TOLERANCE[contest.dtype]:.0e}"
        )
    timed = _on_card if device.type == "cuda" else _on_processor
    return {
        name: dict(zip(contest.least, seconds)) for name, seconds in timed(contest, runners).items()
    }, off


def copies(device: torch.device, size: int) -> int:
    """Sets of inputs of `size` bytes that are used in turn."""
    if device.type != "cuda":
        return 2
    cache = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0) or 50 * 2**20
    return min(MOST_COPIES, max(1, math.ceil(CACHES * cache / size)))


def errors(contest: Contest, runners: dict[str, Runner]) -> dict[str, float]:
    """Contestant -> its largest difference from eager operators on the same inputs widened to fp32,
    of any result or gradient, over the largest value of that one.
    """
    found: dict[str, list[Tensor]] = {}
    incoming: list[Tensor] = []
    for name, runner in runners.items():
        runner.first()
        found[name] = runner.results()
        incoming = incoming or [x.float() for own in runner.incoming[:1] for x in own]
        runner.clear()
        runner.restore()
    widened = tuple(
        x if x is None or not x.is_floating_point() else x.float()
        for x in next(iter(runners.values())).sources[0]
    )
    wide = Runner(contest, contest.contestants["eager"], [widened], incoming=[incoming])
    wide.first()
    truth = wide.results()
    return {name: max(map(_off, own, truth)) for name, own in found.items()}


def _off(mine: Tensor, true: Tensor) -> float:
    off = float((mine.float() - true).abs().max() / true.abs().max().clamp(min=1e-30))
    return off if math.isfinite(off) else math.inf


def _on_processor(contest: Contest, runners: dict[str, Runner]) -> dict[str, list[float]]:
    found: dict[str, list[list[float]]] = {name: [] for name in runners}
    with quiet():
        for index in range(ROUNDS["cpu"] + 1):
            for name, runner in turn(runners, index):
                runner.restore()
                runner.arrange()
                marks = [time.process_time()]
                runner.forward()
                marks.append(time.process_time())
                if contest.trained:
                    runner.backward()
                    marks.append(time.process_time())
                runner.clear()
                if index:
                    found[name].append([(b - a) / len(runner.own) for a, b in pairwise(marks)])
    return {
        name: [statistics.median(one) for one in zip(*rounds)] for name, rounds in found.items()
    }


def _on_card(contest: Contest, runners: dict[str, Runner]) -> dict[str, list[float]]:
    replays = {name: _replays(runner, name in contest.direct) for name, runner in runners.items()}
    marks: dict[str, list[list[Any]]] = {name: [] for name in runners}
    for index in range(ROUNDS["cuda"] + 1):
        for name, runner in turn(runners, index):
            runner.restore()
            if name in contest.direct:
                runner.arrange()
            events = [_mark()]
            for replay in replays[name]:
                replay()
                events.append(_mark())
            marks[name].append(events)
    torch.cuda.synchronize()
    number = len(next(iter(runners.values())).own)
    seconds = {
        name: [
            [1e-3 * a.elapsed_time(b) / number for a, b in pairwise(events)]
            for events in rounds[1:]
        ]
        for name, rounds in marks.items()
    }
    return {
        name: [statistics.median(one) for one in zip(*rounds)] for name, rounds in seconds.items()
    }


def _mark() -> Any:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _replays(runner: Runner, direct: bool) -> list[Callable[[], None]]:
    """Forward and, where there are gradients, backward: captured, or as they are."""
    passes = [runner.forward, runner.backward] if runner.contest.trained else [runner.forward]
    if direct:
        return list(passes)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            runner.first()
            runner.clear()
        runner.arrange()
    torch.cuda.current_stream().wait_stream(stream)
    graphs: list[torch.cuda.CUDAGraph] = []
    for one in passes:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=graphs[0].pool() if graphs else None, stream=stream):
            one()
        graphs.append(graph)
    return [graph.replay for graph in graphs]


def turn(of: dict[str, Any], index: int) -> list[tuple[str, Any]]:
    """All, each time beginning with another."""
    names = list(of)
    start = index % len(names)
    return [(name, of[name]) for name in names[start:] + names[:start]]


@contextmanager
def quiet() -> Iterator[None]:
    """Inside, no garbage is collected."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def seconds_of(device: torch.device, runs: dict[str, Callable[[], object]], rounds: int) -> Seconds:
    """Name -> median seconds of a call, all called in turn, without graphs; each is called twice
    before.
    """
    found: dict[str, list[float]] = {name: [] for name in runs}
    with quiet():
        for index in range(rounds + 2):
            for name, run in turn(runs, index):
                seconds = _once(device, run)
                if index >= 2:
                    found[name].append(seconds)
    return {name: statistics.median(values) for name, values in found.items()}


def _once(device: torch.device, run: Callable[[], object]) -> float:
    if device.type != "cuda":
        began = time.process_time()
        run()
        return time.process_time() - began
    torch.cuda.synchronize()
    start = _mark()
    run()
    end = _mark()
    torch.cuda.synchronize()
    return float(1e-3 * start.elapsed_time(end))


def peak_bytes(device: torch.device, run: Callable[[], object]) -> int:
    """Most bytes that a call has allocated at one instant, beyond what there was before."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    from workbench.engine.measure.allocator_memory import CpuMemoryMeter

    meter = CpuMemoryMeter()
    meter.start()
    run()
    return meter.stop().peak


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second that `Tensor.copy_` of a large tensor reads and writes."""
    source = torch.ones(COPIED[device.type] // 4, device=device)
    target = torch.empty_like(source)
    seconds = seconds_of(device, {"copy": lambda: target.copy_(source)}, ROUNDS[device.type])[
        "copy"
    ]
    return 2 * COPIED[device.type] / seconds


def bytes_of(*tensors: Tensor | None, times: Sequence[float] = ()) -> int:
    """Bytes of tensors, each as often as `times` says, else once."""
    each = times or [1.0] * len(tensors)
    return int(
        sum(n * x.numel() * x.element_size() for x, n in zip(tensors, each) if x is not None)
    )
