"""Building a user's model without values: what its factory fills parameters with is recorded.

Torch's modules allocate parameters with `torch.empty` and fill them in place (`nn.init`). Under
`FillRecorder` such tensors are on the meta device, and fills and arithmetic with numbers are only
noted; each rank then replays them on its own slices, random numbers drawn by counter. A model that
computes its weights in another way, or has random buffers, is not deferred but built as it is.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from workbench.models.counter_hash import column_counters, random_bits, row_keys
from workbench.models.counter_normal import NormalDrawer, chunk_shape, matrices
from workbench.models.torch_dispatch import TorchDispatchMode
from workbench.models.weight_init import seed_of

ALLOCATE = ("empty", "empty_strided")
RANDOM = {"randn": "normal_", "rand": "uniform_"}
"""Operators that make a random tensor -> those that fill one alike."""
OVERWRITE = ("normal_", "uniform_", "zero_", "fill_")
ARITHMETIC = ("mul", "add", "sub", "div", "neg", "clamp", "clamp_min", "clamp_max")
"""Operators that IEEE 754 rounds to one result: a slice is filled as the whole would be."""


@dataclass(frozen=True)
class RecordedFill:
    """What a tensor is filled with.

    Attributes:
        dtype: Of the tensor.
        key: Of its random numbers: copies of a tensor share it, and so their values.
        operators: (operator, arguments after the tensor); the first overwrites everything.
    """

    dtype: torch.dtype
    key: str
    operators: tuple[tuple[Any, tuple[Any, ...]], ...] = ()

    def then(self, operator: Any, arguments: tuple[Any, ...], key: str) -> RecordedFill:
        """This fill and one more operator; `key` is of its random numbers."""
        step = ((operator, arguments),)
        if _name(operator) in OVERWRITE:
            return RecordedFill(self.dtype, key, step)
        return RecordedFill(self.dtype, self.key, self.operators + step)


class NotDeferrable(Exception):
    """The factory does what cannot be replayed slice by slice."""


class FillRecorder(TorchDispatchMode):
    """Puts tensors without values on the meta device, and records what fills them.

    Attributes:
        fills: By the id of each storage on the meta device that is alive.
        failed: The first reason why this cannot be replayed; the factory may have caught its error.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fills: dict[int, RecordedFill] = {}
        self.failed: str | None = None
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._count = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        more, name = kwargs or {}, _name(func)
        if name in ALLOCATE or name in RANDOM:
            out = _on_meta(func, args, more)
            fill = RecordedFill(out.dtype, "")
            if name in RANDOM:
                random = getattr(torch.ops.aten, RANDOM[name]).default
                fill = fill.then(random, (), self._next_key())
            return self._keep(out, fill)
        deferred = [x for x in _tensors((args, more)) if id(x.untyped_storage()) in self.fills]
        if deferred:
            alone = deferred[0] is args[0] and not any(True for _ in _tensors((args[1:], more)))
            return self._record(func, args, more) if alone else self._fail(func)
        if torch.Tag.nondeterministic_seeded in func.tags:
            self._fail(func)  # its numbers would be others than where nothing is deferred
        return func(*args, **more)

    def _record(self, func: Any, args: tuple[Any, ...], more: dict[str, Any]) -> Any:
        tensor, name = args[0], _name(func)
        fill = self.fills[id(tensor.untyped_storage())]
        if name in ("detach", "alias") or func.is_view:
            return func(*args, **more)
        whole = tensor.is_contiguous() and tensor.nbytes == tensor.untyped_storage().nbytes()
        known = name in OVERWRITE or name.removesuffix("_") in ARITHMETIC or name == "clone"
        options = {key: value for key, value in more.items() if key != "memory_format"}
        if not whole or not known or any(value is not None for value in options.values()):
            self._fail(func)
        after = fill if name == "clone" else fill.then(func, tuple(args[1:]), self._next_key())
        if not name.endswith("_"):
            return self._keep(torch.empty_like(tensor), after)
        self.fills[id(tensor.untyped_storage())] = after
        return tensor

    def _keep(self, tensor: Tensor, fill: RecordedFill) -> Tensor:
        storage = tensor.untyped_storage()
        key = id(storage)

        def dead(_: object) -> None:
            self.fills.pop(key, None)
            self._alive.pop(key, None)

        self.fills[key], self._alive[key] = fill, weakref.ref(storage, dead)
        return tensor

    def _next_key(self) -> str:
        self._count += 1
        return str(self._count)

    def _fail(self, func: Any) -> Any:
        self.failed = self.failed or str(func)
        raise NotDeferrable(str(func))


class DeviceReads(TorchFunctionMode):
    """Notes when code asks where a deferred tensor is: it would do otherwise than with a real one,
    as some of `nn.init` skip what is on the meta device.
    """

    def __init__(self, recorder: FillRecorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if func in (torch.Tensor.is_meta.__get__, torch.Tensor.device.__get__) and args[0].is_meta:  # type: ignore[attr-defined]
            self.recorder.failed = self.recorder.failed or "device"
        return found


def build_deferred(
    build: Callable[[], nn.Module],
) -> tuple[nn.Module, dict[str, RecordedFill]] | None:
    """Build a model whose parameters have no values yet.

    Args:
        build: Calls the factory.

    Returns:
        The model, and by parameter name what fills those on the meta device; None where the model
        must be built as it is.
    """
    recorder = FillRecorder()
    try:
        with recorder, DeviceReads(recorder):
            model = build()
    except Exception:  # whatever it is, building the model as it is says it again
        return None
    parameters = dict(model.named_parameters())
    fills = {
        name: recorder.fills.pop(id(value.untyped_storage()), None)
        for name, value in parameters.items()
        if value.is_meta
    }
    lost = [
        *recorder.fills,  # no parameter: a buffer, or a tensor that forward computes with
        *(buffer for buffer in model.buffers() if buffer.is_meta),
        *(name for name, fill in fills.items() if fill is None or not fill.operators),
    ]
    if recorder.failed or lost:
        return None
    return model, {name: fill for name, fill in fills.items() if fill is not None}


@dataclass(frozen=True)
class FillReplay:
    """Fills slices of parameters with what was recorded, a bounded chunk at a time.

    Attributes:
        fills: By parameter name.
        seed: The plan's.
        drawer: Draws normal numbers; says where, and how many at a time.
    """

    fills: Mapping[str, RecordedFill]
    seed: int
    drawer: NormalDrawer

    def fill(
        self, into: Tensor, slices: Sequence[tuple[int, int]], name: str, shape: Sequence[int]
    ) -> None:
        """Fill a box of parameter `name`; see `WeightInit.fill`."""
        for matrix, row, column in matrices(into, slices, shape):
            if not matrix.numel():
                continue
            rows, columns = chunk_shape(matrix.shape[0], matrix.shape[1], self.drawer.chunk_numel)
            for c, of_columns in enumerate(matrix.split(columns, dim=1)):
                for r, part in enumerate(of_columns.split(rows)):
                    at = row + r * rows, column + c * columns
                    part.copy_(self._chunk(self.fills[name], tuple(part.shape), at))

    def _chunk(self, fill: RecordedFill, shape: tuple[int, ...], at: tuple[int, int]) -> Tensor:
        value = torch.empty(shape, dtype=fill.dtype, device=self.drawer.device)
        key = seed_of(fill.key, self.seed)
        for operator, arguments in fill.operators:
            name = _name(operator)
            if name == "normal_":
                mean, deviation = _two_numbers(arguments)
                self.drawer.fill_matrix(value, *at, key, deviation)
                value = value.add_(mean)
            elif name == "uniform_":
                low, high = _two_numbers(arguments)
                value = value.copy_(_uniform(shape, at, key, self.drawer.device))
                value = value.mul_(high - low).add_(low)
            else:
                value = operator(value, *arguments)
        return value


def _two_numbers(written: tuple[Any, ...]) -> tuple[float, float]:
    """Arguments of `normal_` or `uniform_`: both are 0 and 1 where they are not written."""
    first, second = (written + (0.0, 1.0)[len(written) :])[:2]
    return float(first), float(second)


def _uniform(shape: tuple[int, ...], at: tuple[int, int], key: int, device: torch.device) -> Tensor:
    """Numbers [R, C] within [0, 1), multiples of 2^-24, of rows and columns from `at` on."""
    keys = row_keys(torch.arange(at[0], at[0] + shape[0], device=device), key)
    bits = random_bits(column_counters(at[1], shape[1], device), keys)
    return bits.bitwise_and_(2**24 - 1).float().mul_(2**-24)


def _on_meta(func: Any, args: tuple[Any, ...], more: Mapping[str, Any]) -> Tensor:
    shape, *rest = args
    dtype = more.get("dtype")
    if _name(func) == "empty_strided":
        return torch.empty_strided(shape, *rest, dtype=dtype, device="meta")
    return torch.empty(shape, dtype=dtype, device="meta")


def _name(func: Any) -> str:
    return str(func.overloadpacket.__name__)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
