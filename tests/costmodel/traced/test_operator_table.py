"""Every entry of the table of operators against torch on fake tensors: what forward and backward
allocate at their peaks, and what stays between them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from workbench.costmodel.operators.symbolic_autograd import SymbolicTensor, leaf, run_backward
from workbench.costmodel.operators.symbolic_rank import SymbolicRank
from workbench.costmodel.traced import operator_table
from workbench.costmodel.traced.node_call import NodeCall
from workbench.costmodel.traced.tensor_views import lying
from workbench.plan.operators.traced.traced_graph import TensorRef, TracedNode, TracedTensor
from workbench.plan.schema import Plan
from workbench.planner.autoshard.for_plans.plan_machine import operator_mesh
from workbench.planner.operator_plans.planned_workload import planned_workload

FLOAT, INDEX, MASK = torch.float32, torch.int64, torch.bool


class T(NamedTuple):
    """A tensor argument: its dims in memory, and the order in which the operator sees them."""

    shape: tuple[int, ...]
    order: tuple[int, ...] = ()
    dtype: torch.dtype = FLOAT
    trained: bool = True


class Live(NamedTuple):
    """Bytes: between forward and backward, and the most in each."""

    kept: int
    forward: int
    backward: int


def x(*shape: int) -> T:
    return T(shape)


def turned(*shape: int) -> T:
    """Seen with its first two dims swapped."""
    return T(shape, (1, 0, *range(2, len(shape))))


def heads(*shape: int) -> T:
    """[B, T, heads, depth] seen as [B, heads, T, depth]."""
    return T(shape, (0, 2, 1, 3))


def index(*shape: int) -> T:
    return T(shape, dtype=INDEX, trained=False)


def mask(*shape: int) -> T:
    return T(shape, dtype=MASK, trained=False)


A = x(2, 16, 8)
FIXED = T((2, 16, 8), trained=False)
INDICES = index(2, 16, 8)
COMPLEX = torch.complex64
Z, ROTATION = T((2, 16, 8), dtype=COMPLEX), T((16, 8), dtype=COMPLEX, trained=False)
UNARY = (
    *("neg", "relu", "tanh", "sigmoid", "exp", "sqrt", "rsqrt", "reciprocal", "gelu", "silu"),
    *("mish", "elu", "leaky_relu", "hardtanh", "softplus", "hardswish", "hardsigmoid", "log"),
    *("sin", "cos", "abs", "erf", "square", "selu", "celu", "relu6", "logit", "log1p", "expm1"),
    *("exp2", "floor", "ceil", "round", "trunc", "sign", "log_sigmoid", "nan_to_num"),
)
BOOLEAN = ("logical_and", "logical_or", "logical_xor", "bitwise_and", "bitwise_or", "bitwise_xor")
MADE = {"dtype": FLOAT}
CASES: list[tuple[str, str, tuple[Any, ...], dict[str, Any]]] = [
    *((name, "default", (A,), {}) for name in UNARY),
    *((name, "default", (turned(16, 2, 8),), {}) for name in ("tanh", "gelu", "relu")),
    *((name, "Tensor", (A, A), {}) for name in ("add", "sub", "mul", "div")),
    *((name, "Tensor", (A, x(8)), {}) for name in ("add", "sub", "mul", "div")),
    *((name, "Tensor", (A, x(2, 16, 1)), {}) for name in ("add", "mul")),
    *((name, "Tensor", (turned(16, 2, 8), A), {}) for name in ("add", "mul", "div")),
    *((name, "Tensor", (A, 3.0), {}) for name in ("add", "sub", "mul", "div")),
    *((name, "Tensor", (A, INDICES), {}) for name in ("add", "sub", "mul", "div")),
    *((name, "Tensor", (INDICES, A), {}) for name in ("add", "sub", "mul")),
    *(("add", "Tensor", each, {}) for each in ((A, T((8,), trained=False)), (FIXED, x(8)))),
    ("mul", "Tensor", (mask(2, 16, 8), INDICES), {}),
    ("true_divide", "Tensor", (A, A), {}),
    *((name, "default", (A, A), {}) for name in ("maximum", "minimum")),
    ("maximum", "default", (A, x(8)), {}),
    ("clamp", "default", (A, -1.0, 1.0), {}),
    ("clamp", "default", (A, None, 1.0), {}),
    *((name, "default", (A, 0.0), {}) for name in ("clamp_min", "clamp_max")),
    ("rsub", "Scalar", (A, 1.0), {}),
    ("rsub", "Tensor", (A, A), {}),
    ("where", "self", (mask(2, 16, 1), A, A), {}),
    ("where", "ScalarOther", (mask(2, 16, 8), A, 0.0), {}),
    ("masked_fill", "Scalar", (A, mask(16, 8), 0.0), {}),
    ("pow", "Tensor_Scalar", (A, 3), {}),
    ("pow", "Scalar", (10.0, A), {}),
    *((name, "Tensor", (A, A), {}) for name in ("eq", "ne", "lt", "le", "gt", "ge")),
    *((n, "Tensor" if "bit" in n else "default", (mask(2, 8), mask(2, 8)), {}) for n in BOOLEAN),
    *((name, "default", (mask(2, 8),), {}) for name in ("logical_not", "bitwise_not")),
    *((name, "Tensor", (mask(2, 8), mask(8)), {}) for name in ("__and__", "__or__", "__xor__")),
    *((name, "default", (A,), {}) for name in ("isnan", "isinf")),
    ("floor_divide", "default", (index(2, 8), 2), {}),
    *((name, "default", (A, A, A), {"value": 0.5}) for name in ("addcmul", "addcdiv")),
    *((name, "default", (A, x(8), A), {}) for name in ("addcmul", "addcdiv")),
    *((name, "default", (A, A, x(8)), {}) for name in ("addcmul", "addcdiv")),
    *((name, "default", (A, FIXED, A), {}) for name in ("addcmul", "addcdiv")),
    *((name, "default", (A, A, FIXED), {}) for name in ("addcmul", "addcdiv")),
    *((name, "Scalar", (A, 2.0), {}) for name in ("fmod", "remainder")),
    *((name, "Tensor", (A, A), {}) for name in ("fmod", "remainder")),
    *((name, "Tensor", (A, x(8)), {}) for name in ("fmod", "remainder")),
    *((name, "Tensor", (A, FIXED), {}) for name in ("fmod", "remainder")),
    *((name, "Tensor", (FIXED, A), {}) for name in ("fmod", "remainder")),
    *(("lerp", "Scalar", (start, A, 0.5), {}) for start in (A, FIXED)),
    *(("lerp", "Tensor", (A, A, weight), {}) for weight in (A, FIXED, x(8))),
    ("lerp", "Tensor", (FIXED, FIXED, A), {}),
    ("linear", "default", (A, x(12, 8), x(12)), {}),
    ("linear", "default", (A, x(12, 8)), {}),
    ("linear", "default", (turned(16, 2, 8), x(12, 8), x(12)), {}),
    ("linear", "default", (turned(16, 2, 8), x(12, 8)), {}),
    ("linear", "default", (x(32, 8), x(12, 8), x(12)), {}),
    ("addmm", "default", (x(12), x(32, 8), x(8, 12)), {}),
    ("matmul", "default", (x(32, 8), x(8, 12)), {}),
    ("matmul", "default", (A, x(8, 12)), {}),
    ("matmul", "default", (heads(2, 16, 4, 8), T((2, 16, 4, 8), (0, 2, 3, 1))), {}),
    ("matmul", "default", (x(2, 4, 16, 16), heads(2, 16, 4, 8)), {}),
    ("matmul", "default", (x(2, 4, 16, 16), x(1, 1, 16, 8)), {}),
    ("mm", "default", (x(32, 8), x(8, 12)), {}),
    ("bmm", "default", (x(4, 16, 8), x(4, 8, 12)), {}),
    ("einsum", "default", ("bte,btc->btec", [x(2, 16, 4), x(2, 16, 6)]), {}),
    ("einsum", "default", ("btec,btd->becd", [x(2, 16, 4, 6), x(2, 16, 8)]), {}),
    ("einsum", "default", ("becd,edf->becf", [x(2, 4, 6, 8), x(4, 8, 10)]), {}),
    ("einsum", "default", ("btec,becd->btd", [x(2, 16, 4, 6), x(2, 4, 6, 8)]), {}),
    ("einsum", "default", ("bhqd,bhkd->bhqk", [heads(2, 16, 4, 8), heads(2, 16, 4, 8)]), {}),
    ("outer", "default", (x(16), x(8)), {}),
    *(("conv1d", "default", (x(2, 8, 16), x(12, 8, 4), *bias), {}) for bias in ((), (x(12),))),
    ("conv1d", "default", (T((2, 16, 8), (0, 2, 1)), x(8, 1, 4), x(8), [1], [3], [1], 8), {}),
    ("conv1d", "default", (T((2, 8, 16), trained=False), x(12, 8, 4), x(12), [2]), {}),
    ("view_as_complex", "default", (x(2, 16, 3, 4, 2),), {}),
    ("view_as_complex", "default", (T((16, 2, 4, 2), (1, 0, 2, 3)),), {}),
    *(("view_as_real", "default", (each,), {}) for each in (Z, T((16, 2, 4), (1, 0, 2), COMPLEX))),
    *(("mul", "Tensor", each, {}) for each in ((Z, ROTATION), (ROTATION, Z), (Z, Z), (Z, FIXED))),
    *(("mul", "Tensor", (Z, T(shape, dtype=COMPLEX)), {}) for shape in ((8,), (2, 1, 8))),
    *((name, "Tensor", (Z, ROTATION), {}) for name in ("add", "sub")),
    *(("pad", "default", (A, each), {}) for each in ([3, 0], [0, 0, 1, -1], [0, 0, 0, 0])),
    ("pad", "default", (turned(16, 2, 8), [0, 2], "constant", 1.0), {}),
    ("outer", "default", (T((16,), trained=False), x(8)), {}),
    ("embedding", "default", (x(260, 8), index(2, 16)), {}),
    ("scaled_dot_product_attention", "default", (*[heads(2, 16, 4, 8)] * 3, None, 0.0, True), {}),
    (
        "scaled_dot_product_attention",
        "default",
        (*[x(2, 4, 16, 8)] * 3, T((16, 16), trained=False)),
        {},
    ),
    ("scaled_dot_product_attention", "default", (*[heads(2, 16, 4, 8)] * 3, mask(16, 16)), {}),
    ("dropout", "default", (A, 0.0, True), {}),
    ("cross_entropy_loss", "default", (x(32, 260), index(32), None, 2), {}),
    *((name, "int", (x(2, 16, 8), -1), {}) for name in ("softmax", "log_softmax")),
    *((name, "default", (A, -1, False), {}) for name in ("_softmax", "_log_softmax")),
    ("softmax", "int", (T((2, 16, 8), dtype=torch.bfloat16), -1, FLOAT), {}),
    ("mean", "dim", (A, [-1], True), {}),
    ("mean", "dim", (A, [0, 1]), {}),
    ("sum", "dim_IntList", (A, [-1]), {}),
    ("sum", "dim_IntList", (A, [1], True), {}),
    ("sum", "default", (A,), {}),
    ("var", "correction", (A, [-1]), {"correction": 1}),
    ("layer_norm", "default", (A, [8], x(8), x(8)), {}),
    ("layer_norm", "default", (turned(16, 2, 8), [8], x(8), x(8)), {}),
    ("layer_norm", "default", (A, [8]), {}),
    ("layer_norm", "default", (FIXED, [8], x(8), x(8)), {}),
    ("rms_norm", "default", (A, [8], x(8)), {}),
    ("rms_norm", "default", (A, [8]), {}),
    ("rms_norm", "default", (T((2, 16, 8), dtype=torch.bfloat16), [8]), {}),
    ("cumsum", "default", (A, 1), {}),
    ("logsumexp", "default", (A, [-1]), {}),
    *(("cumprod", "default", (A, dim), {}) for dim in (0, 1)),
    *((name, "default", (A, [-1]), {}) for name in ("amax", "amin")),
    *((name, "default", (A, [0, 1], True), {}) for name in ("amax", "amin")),
    ("amax", "default", (A,), {}),
    *((name, "dim", (A, -1), {}) for name in ("max", "min")),
    *(("max", "dim", each, {}) for each in ((A, 1, True), (FIXED, -1))),
    *((name, "default", (A,), {}) for name in ("max", "min")),
    *((name, "other", (A, x(8)), {}) for name in ("max", "min")),
    ("argsort", "default", (A, -1), {}),
    ("argsort", "stable", (A,), {"stable": True, "dim": 1}),
    ("topk", "default", (A, 2), {}),
    ("sort", "default", (A, -1), {}),
    *((name, "default", (A, -1), {}) for name in ("argmax", "argmin")),
    ("one_hot", "default", (index(2, 16), 8), {}),
    *((name, "default", (x(16, 16),), {}) for name in ("triu", "tril")),
    *((name, "default", (A, [32, 8]), {}) for name in ("view", "reshape", "_unsafe_view")),
    ("reshape", "default", (turned(16, 2, 8), [32, 8]), {}),
    ("flatten", "using_ints", (A, 0, 1), {}),
    ("unflatten", "int", (A, -1, [2, 4]), {}),
    ("unsqueeze", "default", (A, 1), {}),
    ("squeeze", "dim", (x(2, 1, 8), 1), {}),
    ("transpose", "int", (A, 0, 1), {}),
    ("permute", "default", (A, [2, 0, 1]), {}),
    *((name, "default", (x(4, 8),), {}) for name in ("t", "numpy_T", "mT")),
    ("expand", "default", (x(2, 1, 8), [2, 16, 8]), {}),
    ("expand", "default", (x(16, 8), [2, 16, 8]), {}),
    ("slice", "Tensor", (A, 1, 0, 4), {}),
    ("slice", "Tensor", (A, 1, 0, 16, 2), {}),
    ("select", "int", (A, 0, 1), {}),
    ("unbind", "int", (A, 0), {}),
    ("split", "Tensor", (A, 4, -1), {}),
    ("split_with_sizes", "default", (A, [2, 6], -1), {}),
    ("chunk", "default", (A, 2, -1), {}),
    *((name, "default", ([A, A], -1), {}) for name in ("cat", "concat")),
    ("stack", "default", ([A, A], 1), {}),
    ("contiguous", "default", (A,), {}),
    ("contiguous", "default", (turned(16, 2, 8),), {}),
    ("clone", "default", (turned(16, 2, 8),), {}),
    ("clone", "default", (A,), {"memory_format": torch.contiguous_format}),
    ("lift_fresh_copy", "default", (index(4),), {}),
    ("to", "dtype", (A, torch.bfloat16), {}),
    ("to", "dtype", (A, FLOAT), {}),
    *(("to", "dtype", (A, kind), {}) for kind in (MASK, INDEX)),
    ("to", "dtype", (mask(2, 8), FLOAT), {}),
    ("type_as", "default", (A, T((2,), dtype=torch.float64, trained=False)), {}),
    ("_to_copy", "default", (A,), {"dtype": torch.bfloat16}),
    ("alias", "default", (A,), {}),
    ("detach", "default", (A,), {}),
    *((name, "default", (A,), {}) for name in ("zeros_like", "ones_like", "empty_like")),
    ("full_like", "default", (A, 1.0), {}),
    ("full", "default", ([4, 8], 1.0), MADE),
    *((name, "default", ([4, 8],), MADE) for name in ("zeros", "ones")),
    ("empty", "memory_format", ([4, 8],), MADE),
    ("arange", "default", (16,), MADE),
    ("scalar_tensor", "default", (1.0,), MADE),
    ("eye", "default", (8,), MADE),
    ("linspace", "default", (0.0, 1.0, 16), MADE),
]


class Counter(TorchDispatchMode):
    """Bytes of the storages that are alive, of those that operators make under it."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.most = 0
        self.seen: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {id(t.untyped_storage()) for t in tensors((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for each in tensors(result):
            storage = each.untyped_storage()
            if id(storage) not in self.seen and id(storage) not in given:
                self._count(storage)
        return result

    def _count(self, storage: Any) -> None:
        key, size = id(storage), storage.nbytes()

        def gone(_: object) -> None:
            self.seen.pop(key)
            self.live -= size

        self.seen[key] = weakref.ref(storage, gone)
        self.live += size
        self.most = max(self.most, self.live)


def tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from tensors(tuple(value.values()))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors(each)


def replaced(value: Any, of: Any) -> Any:
    """Arguments with something in place of each tensor."""
    if isinstance(value, T):
        return of(value)
    if type(value) in (list, tuple):
        return type(value)(replaced(each, of) for each in value)
    return value


def made(given: T) -> Tensor:
    base = torch.empty(given.shape, dtype=given.dtype, requires_grad=given.trained)
    if given.trained:
        base.grad = torch.zeros(given.shape, dtype=given.dtype)
    return base.permute(given.order) if given.order else base


def of_torch(op: str, overload: str, args: Any, named: Any) -> tuple[Live, list[Tensor]]:
    with FakeTensorMode():
        inputs = replaced(args, made)
        call = getattr(getattr(torch.ops.aten, op), overload)
        counter = Counter()
        with counter:
            results = [*tensors(call(*inputs, **named))]
            forward, kept = counter.most, counter.live
            counter.most = counter.live
        roots = [y for y in results if y.requires_grad and y.grad_fn is not None]
        gradients = [torch.ones(y.shape, dtype=y.dtype) for y in roots]
        with counter:
            if roots:
                torch.autograd.backward(roots, gradients)
        return Live(kept, forward, counter.most), results


def on_shapes(op: str, overload: str, args: Any, named: Any, results: list[Tensor]) -> Live:
    plan = Plan.model_validate({"model": "tiny", "cluster": {"gpu": "local", "gpus": 1}}).resolve()
    r = SymbolicRank(planned_workload(plan), (), operator_mesh(plan).redistribution)
    inputs: list[SymbolicTensor] = []
    dtypes: list[str] = []

    def given(t: T) -> TensorRef:
        strides = torch.empty(t.shape, device="meta").permute(t.order or tuple(range(len(t.shape))))
        size, node = t.dtype.itemsize, leaf(lambda g: None, "") if t.trained else None
        shape, lying = tuple(strides.shape), strides.stride()
        inputs.append(SymbolicTensor(r.tape.allocate(0), shape, size, node, strides=lying))
        dtypes.append(str(t.dtype))
        return TensorRef(str(len(inputs)))

    def plain(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return tuple(plain(each) for each in value)
        return str(value) if isinstance(value, torch.dtype | torch.memory_format) else value

    found = plain(replaced(args, given))
    outputs = tuple(TracedTensor(tuple(y.shape), str(y.dtype)) for y in results)
    kwargs = {name: plain(value) for name, value in named.items()}
    node = TracedNode("n", "n", op, overload, found, kwargs, outputs)
    sizes = [y.dtype.itemsize for y in results]
    call = NodeCall(r, node, inputs, [o.shape for o in outputs], sizes, dtypes)
    ys = operator_table.run(call)
    for y, real, size in zip(ys, results, sizes):
        assert (y.shape, y.element_bytes) == (tuple(real.shape), size)
        long = [at for at, length in enumerate(real.shape) if length > 1]
        assert [lying(y)[at] for at in long] == [real.stride()[at] for at in long]
    r.tape.end_action("activations")
    forward, kept = _most(r), r.tape.total
    r.tape.largest = {}
    roots = [
        (y, SymbolicTensor(r.tape.allocate(0), y.shape, y.element_bytes))
        for y in ys
        if y.node is not None and y.node.backward is not None
    ]
    if roots:
        run_backward(r.tape, roots)
    r.tape.end_action("communication")
    return Live(int(kept), forward, max(_most(r), int(kept)))


def _most(r: SymbolicRank) -> int:
    return int(max((sum(live.values()) for live in r.tape.largest.values()), default=0))


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}.{case[1]}")
def test_an_entry_is_what_torch_does(case: Any) -> None:
    expected, results = of_torch(*case)
    assert on_shapes(*case, results) == expected


def test_every_entry_has_a_case() -> None:
    assert {case[0] for case in CASES} == {*operator_table.ENTRIES}
