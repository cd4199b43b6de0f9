"""Multi-tensor AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101) in one launch.

Gradients, weights and moments are read once; weights, their 16-bit copies and moments are written
once. Gradients of any dtype are scaled, and 16-bit state upcast, in registers. A table of addresses
on the device replaces per-tensor arguments. Triton only: elsewhere torch's fused AdamW is used.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from workbench.kernels.backends.operator_registration import fused_operator, register_fake
from workbench.kernels.backends.triton_compat import accumulation_type, jit, runs_triton, tl
from workbench.kernels.input_checks import FLOAT_DTYPES, check_shape, check_tensors

BLOCK = 1024
"""Entries per program."""
MAX_VECTOR_BYTES = 16
"""Bytes of a vectorised load; a tensor that is not aligned to them is loaded entry by entry."""


def reference(
    parameter: Tensor,
    gradient: Tensor,
    moment1: Tensor,
    moment2: Tensor,
    count: int,
    rate: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    decay: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """(parameter, moment1, moment2) after step `count`, from 1, by plain operators."""
    moment1 = beta1 * moment1 + (1 - beta1) * gradient
    moment2 = beta2 * moment2 + (1 - beta2) * gradient.square()
    deviation = (moment2 / (1 - beta2**count)).sqrt()
    update = moment1 / (1 - beta1**count) / (deviation + epsilon)
    return parameter * (1 - rate * decay) - rate * update, moment1, moment2


# ---- Triton --------------------------------------------------------------------------------------


@jit
def adamw_count(  # type: ignore[no-untyped-def]
    TABLE,
    NUMBERS,
    COMMON,
    SKIP,
    num_tensors,
    HAS_SKIP: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Increment the step counts, and derive each tensor's bias corrections in fp64."""
    tensors = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = tensors < num_tensors
    at = tl.load(TABLE + tensors * COLUMNS + 5, mask=here, other=0).to(tl.pointer_type(tl.float32))
    count = tl.load(at, mask=here, other=1.0) + 1.0
    if HAS_SKIP:
        count -= tl.load(SKIP).to(tl.float32)
    tl.store(at, count, mask=here)
    rate = tl.load(COMMON)
    correction1 = 1.0 - tl.exp(count.to(tl.float64) * tl.log(tl.load(COMMON + 1)))
    correction2 = 1.0 - tl.exp(count.to(tl.float64) * tl.log(tl.load(COMMON + 3)))
    own = NUMBERS + tensors * 4
    tl.store(own + 1, rate * tl.load(own, mask=here, other=0.0), mask=here)
    tl.store(own + 2, rate / correction1, mask=here)
    tl.store(own + 3, tl.sqrt(correction2), mask=here)


@jit
def adamw_step(  # type: ignore[no-untyped-def]
    TABLE,
    CHUNKS,
    NUMBERS,
    COMMON,
    SCALE,
    SKIP,
    GRADIENT: tl.constexpr,
    TARGET: tl.constexpr,
    COPY: tl.constexpr,
    MOMENT: tl.constexpr,
    WIDE: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_SKIP: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOGETHER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One block of one tensor per program."""
    if HAS_SKIP:  # noqa: SIM102 (decided when this is compiled)
        if tl.load(SKIP) == 1:
            return
    scale = tl.load(SCALE).to(WIDE) if HAS_SCALE else None
    chunk = CHUNKS + tl.program_id(0).to(tl.int64) * 2
    tensor = tl.load(chunk).to(tl.int64)
    start = tl.load(chunk + 1).to(tl.int64) * BLOCK
    row = TABLE + tensor * COLUMNS
    left = tl.load(row + 6) - start
    # A mask, or an address of unknown alignment, would prevent vectorised loads.
    if (left >= BLOCK) & (tl.load(row + 7) != 0):
        _entries(
            row,
            NUMBERS + tensor * 4,
            COMMON,
            scale,
            start,
            None,
            GRADIENT,
            TARGET,
            COPY,
            MOMENT,
            WIDE,
            TOGETHER,
            BLOCK,
        )
    else:
        _entries(
            row,
            NUMBERS + tensor * 4,
            COMMON,
            scale,
            start,
            tl.arange(0, BLOCK) < left,
            GRADIENT,
            TARGET,
            COPY,
            MOMENT,
            WIDE,
            1,
            BLOCK,
        )


@jit
def _entries(  # type: ignore[no-untyped-def]
    row,
    own,
    COMMON,
    scale,
    start,
    here,
    GRADIENT: tl.constexpr,
    TARGET: tl.constexpr,
    COPY: tl.constexpr,
    MOMENT: tl.constexpr,
    WIDE: tl.constexpr,
    TOGETHER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = start + tl.arange(0, BLOCK)
    target_at = _pointer(row + 1, TARGET, TOGETHER) + at
    moment1_at = _pointer(row + 3, MOMENT, TOGETHER) + at
    moment2_at = _pointer(row + 4, MOMENT, TOGETHER) + at
    gradient = tl.load(_pointer(row, GRADIENT, TOGETHER) + at, mask=here).to(WIDE)
    moment1 = tl.load(moment1_at, mask=here).to(WIDE)
    moment2 = tl.load(moment2_at, mask=here).to(WIDE)
    target = tl.load(target_at, mask=here).to(WIDE)
    if scale is not None:
        gradient *= scale
    moment1 = tl.load(COMMON + 1).to(WIDE) * moment1 + tl.load(COMMON + 2).to(WIDE) * gradient
    moment2 = tl.load(COMMON + 3).to(WIDE) * moment2 + tl.load(COMMON + 4).to(WIDE) * (
        gradient * gradient
    )
    deviation = _ratio(_root(moment2), tl.load(own + 3).to(WIDE)) + tl.load(COMMON + 5).to(WIDE)
    target -= tl.load(own + 1).to(WIDE) * target
    target -= _ratio(tl.load(own + 2).to(WIDE) * moment1, deviation)
    tl.store(moment1_at, moment1.to(MOMENT), mask=here)
    tl.store(moment2_at, moment2.to(MOMENT), mask=here)
    tl.store(target_at, target.to(TARGET), mask=here)
    if COPY is not None:
        tl.store(_pointer(row + 2, COPY, TOGETHER) + at, target.to(COPY), mask=here)


@jit
def _pointer(at, DTYPE: tl.constexpr, TOGETHER: tl.constexpr):  # type: ignore[no-untyped-def]
    # All loads have the same number of entries: a different layout of the 16-bit ones would need a
    # conversion through shared memory.
    return tl.multiple_of(
        tl.load(at).to(tl.pointer_type(DTYPE)), TOGETHER * (DTYPE.primitive_bitwidth // 8)
    )


@jit
def _root(x):  # type: ignore[no-untyped-def]
    return tl.sqrt_rn(x) if x.dtype == tl.float32 else tl.sqrt(x)


@jit
def _ratio(x, y):  # type: ignore[no-untyped-def]
    return tl.div_rn(x, y) if x.dtype == tl.float32 else x / y


# ---- the operator --------------------------------------------------------------------------------


class AdamWTensor(NamedTuple):
    """A parameter with gradient and state: contiguous, of one shape but for `steps`."""

    parameter: Tensor
    gradient: Tensor
    moment1: Tensor
    moment2: Tensor
    """Of the dtype of `moment1`."""
    steps: Tensor
    """Steps taken: 0-d, fp32."""
    master: Tensor | None
    """fp32 master weight, of which the parameter is the rounded copy; None without one."""
    decay: float
    """Weight decay per unit of learning rate."""


def is_supported(x: Tensor) -> bool:
    """Whether the kernel can take `x`: Triton runs on its device, and it is contiguous."""
    return runs_triton(x.device) and x.is_contiguous()


class FusedAdamW:
    """Updates tensors with two launches per combination of dtypes (step counts, then entries).

    Storages may move between steps: addresses are read at each step.

    Args:
        tensors: The tensors, referenced, not copied.
        beta1: Decay of the first moment.
        beta2: Decay of the second moment.
        epsilon: Added to the denominator.

    Raises:
        ValueError: Names the tensor of an unsupported device, dtype, shape or strides.
    """

    def __init__(
        self, tensors: Iterable[AdamWTensor], beta1: float, beta2: float, epsilon: float
    ) -> None:
        kinds: dict[tuple[Any, ...], list[AdamWTensor]] = {}
        for tensor in tensors:
            _check(tensor)
            kinds.setdefault(_kind(tensor), []).append(tensor)
        self._launches = [_Launch(own, beta1, beta2, epsilon) for own in kinds.values()]

    @torch.no_grad()
    def step(self, rate: float, scale: Tensor | None = None, skip: Tensor | None = None) -> None:
        """Update all tensors; gradients are not modified.

        Args:
            rate: Learning rate.
            scale: 0-d factor of the gradients.
            skip: 0-d; where 1, nothing changes, step counts included.
        """
        check_shape("adamw", "scale", scale, ())
        check_shape("adamw", "skip", skip, ())
        for launch in self._launches:
            device = launch.table.device
            launch(rate, *(None if x is None else x.to(device) for x in (scale, skip)))


class _Launch:
    """Tensors of the same dtypes on one device, and their tables of addresses."""

    def __init__(
        self, own: Sequence[AdamWTensor], beta1: float, beta2: float, epsilon: float
    ) -> None:
        device = own[0].parameter.device
        self.targets = [x.parameter if x.master is None else x.master for x in own]
        self.copies = [x.parameter for x in own if x.master is not None]
        self.gradients = [x.gradient for x in own]
        self.moments = [x.moment1 for x in own], [x.moment2 for x in own]
        self.counts = [x.steps for x in own]
        blocks = [torch.arange(-(-x.numel() // BLOCK), dtype=torch.int32) for x in self.targets]
        chunks = [torch.stack((torch.full_like(own, i), own), 1) for i, own in enumerate(blocks)]
        self.chunks = torch.cat(chunks).to(device)
        self.seen = torch.zeros(len(own), 8, dtype=torch.int64)
        self.table = torch.zeros(len(own), 8, dtype=torch.int64, device=device)
        numbers = [(x.decay, 0.0, 0.0, 0.0) for x in own]
        self.numbers = torch.tensor(numbers, dtype=torch.float64, device=device)
        common = (0.0, beta1, 1 - beta1, beta2, 1 - beta2, epsilon)
        self.common = torch.tensor(common, dtype=torch.float64, device=device)

    def __call__(self, rate: float, scale: Tensor | None, skip: Tensor | None) -> None:
        adamw_op(
            self.targets,
            self.copies,
            self.gradients,
            *self.moments,
            self.counts,
            self.chunks,
            self.seen,
            self.table,
            self.numbers,
            self.common,
            scale,
            skip,
            rate,
        )


MUTATED_ARGUMENTS = (
    "targets",
    "copies",
    "moment1",
    "moment2",
    "counts",
    "seen",
    "table",
    "numbers",
    "common",
)


@fused_operator("adamw", mutates_args=MUTATED_ARGUMENTS)
def adamw_op(
    targets: Sequence[Tensor],
    copies: Sequence[Tensor],
    gradients: Sequence[Tensor],
    moment1: Sequence[Tensor],
    moment2: Sequence[Tensor],
    counts: Sequence[Tensor],
    chunks: Tensor,
    seen: Tensor,
    table: Tensor,
    numbers: Tensor,
    common: Tensor,
    scale: Tensor | None,
    skip: Tensor | None,
    rate: float,
) -> None:
    """Update `targets`, and round them into `copies` where there are any.

    A row of `table` [tensors, 8] has the addresses of gradient, target, copy, both moments and step
    count, the number of entries, and whether all are aligned for vectorised loads; `seen` is its
    copy on the host. A row of `numbers` [tensors, 4] has the decay, this step's decay, this step's
    size, and the root of the second moment's bias correction. `chunks` [n, 2] are (tensor, block);
    `common` is (rate, beta1, 1 - beta1, beta2, 1 - beta2, epsilon).
    """
    _locate((gradients, targets, copies or targets, moment1, moment2, counts), seen, table)
    common[0].fill_(rate)
    constants = {"HAS_SKIP": skip is not None, "COLUMNS": table.shape[1]}
    adamw_count[(-(-len(targets) // 256),)](
        table, numbers, common, skip, len(targets), BLOCK=256, **constants
    )
    if len(chunks):
        adamw_step[(len(chunks),)](
            table,
            chunks,
            numbers,
            common,
            scale,
            skip,
            GRADIENT=_dtype(gradients[0]),
            TARGET=_dtype(targets[0]),
            COPY=_dtype(copies[0]) if copies else None,
            MOMENT=_dtype(moment1[0]),
            WIDE=accumulation_type(targets[0], moment1[0]),
            HAS_SCALE=scale is not None,
            TOGETHER=MAX_VECTOR_BYTES
            // max(x.itemsize for x in (gradients[0], targets[0], moment1[0])),
            BLOCK=BLOCK,
            num_warps=4,
            **constants,
        )


@register_fake(adamw_op)
def _(*_: Any) -> None:
    """Fake tensors have no addresses; the update allocates nothing."""


def _locate(columns: Sequence[Sequence[Tensor]], seen: Tensor, table: Tensor) -> None:
    """Refresh the addresses in `table`; synchronises only if a tensor has moved."""
    now = torch.tensor(
        [[x.data_ptr() for x in column] for column in columns], dtype=torch.int64
    ).t()
    if torch.equal(now, seen[:, : len(columns)]):
        return
    for x in (x for column in columns for x in column):
        if x.untyped_storage().nbytes() < (x.storage_offset() + x.numel()) * x.itemsize:
            raise ValueError(
                f"adamw: the storage of a tensor of shape {tuple(x.shape)} is freed; legal: whole "
                f"tensors"
            )
    seen[:, : len(columns)] = now
    seen[:, 6] = torch.tensor([x.numel() for x in columns[1]])
    seen[:, 7] = (now[:, :5] % MAX_VECTOR_BYTES == 0).all(1)
    table.copy_(seen)


def _dtype(x: Tensor) -> Any:
    return getattr(tl, _name(x.dtype))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _kind(own: AdamWTensor) -> tuple[Any, ...]:
    master = None if own.master is None else own.master.dtype
    return own.parameter.device, own.parameter.dtype, own.gradient.dtype, own.moment1.dtype, master


def _check(own: AdamWTensor) -> None:
    held = {name: x for name, x in own._asdict().items() if isinstance(x, Tensor)}
    check_tensors("adamw", "parameter", **held)
    if not runs_triton(own.parameter.device):
        raise ValueError(f"adamw: parameter is on {own.parameter.device}; legal: where Triton runs")
    for name, x in held.items():
        check_shape("adamw", name, x, () if name == "steps" else own.parameter.shape)
        legal = {"steps": (torch.float32,), "moment2": (own.moment1.dtype,)}.get(name, FLOAT_DTYPES)
        if x.dtype not in legal:
            raise ValueError(
                f"adamw: {name} is {_name(x.dtype)}; legal: {', '.join(map(_name, legal))}"
            )
        if not x.is_contiguous():
            raise ValueError(f"adamw: {name} has strides {x.stride()}; legal: contiguous tensors")
