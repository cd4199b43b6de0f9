"""What one call would move without kernels that hold several operators: its primitive operators.

torch's own eager kernels are fused already: a layer norm, a GELU or a softmax is one kernel of some
ten elementwise operators and reductions, and attention keeps its scores on chip. A compiler that
fuses graphs (MindSpore's graph-kernel fusion, XLA) begins with these operators instead, each of
which reads its operands and writes its results.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._decomp import get_decompositions
from torch.utils._pytree import tree_map

from workbench.models.torch_dispatch import TorchDispatchMode, without_dispatch_modes
from workbench.rehearsal.operators.operator_traffic import traffic

if not "2.11" <= torch.__version__ < "2.14":
    raise ImportError(
        f"workbench.rehearsal.primitive_operators uses torch's private decompositions of 2.11 to "
        f"2.13, not {torch.__version__}"
    )

COMPOUND = (
    *("native_layer_norm", "native_layer_norm_backward", "native_dropout"),
    *("native_dropout_backward", "gelu", "gelu_backward", "silu", "silu_backward"),
    *("_softmax", "_softmax_backward_data", "_log_softmax", "_log_softmax_backward_data"),
)
"""Kernels of several elementwise operators and reductions, by torch's names."""
ATTENTION = "_scaled_dot_product_"
GEMMS = frozenset({"mm", "bmm", "addmm", "baddbmm"})


class Primitives(NamedTuple):
    """Primitive operators of one call, GEMMs apart, and the bytes that they read and write."""

    number: int
    bytes: int


@dataclass(frozen=True)
class Description:
    """A tensor without its entries."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class Call(NamedTuple):
    """A call whose tensors are described, so that no tensor lives longer for it."""

    func: Any
    args: Any
    kwargs: Any


def is_compound(func: Any) -> bool:
    """Whether an operator is a kernel of several primitive ones."""
    name = func.overloadpacket.__name__
    return name in COMPOUND or (name.startswith(ATTENTION) and "math" not in name)


def described(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """The call, to be counted later."""
    return Call(func, *tree_map(_describe, (args, kwargs)))


def primitives(call: Call) -> Primitives:
    """The primitive operators of a call of a compound kernel, counted on tensors without bytes."""
    with without_dispatch_modes(), _Counter() as counter:
        args, kwargs = tree_map(_meta, (call.args, call.kwargs))
        name = call.func.overloadpacket.__name__
        if name.startswith(ATTENTION):
            _attention(call.func, args, kwargs, name.endswith("backward"), counter)
        else:
            call.func(*args, **kwargs)
    return Primitives(counter.count, counter.bytes)


class _Counter(TorchDispatchMode):
    """Counts what runs, compound kernels by their parts."""

    count = bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _table():
            with self:
                return _table()[func](*args, **(kwargs or {}))
        out = func(*args, **(kwargs or {}))
        moved = traffic(func, args, kwargs or {}, out)
        if moved is not None and func.overloadpacket.__name__ not in GEMMS:
            self.count, self.bytes = self.count + 1, self.bytes + moved.read + moved.written
        return out


def _attention(
    func: Any, args: Any, kwargs: dict[str, Any], is_backward: bool, counter: _Counter
) -> None:
    """Attention whose scores are tensors; of a backward call what differentiating it runs."""
    where = [argument.name for argument in func._schema.arguments].index("is_causal")
    causal = bool(args[where]) if len(args) > where else bool(kwargs.get("is_causal"))
    q, k, v = (x.detach().requires_grad_() for x in args[is_backward : is_backward + 3])
    with torch.enable_grad():
        out = plain_attention(q, k, v, causal)
    if is_backward:
        counter.count = counter.bytes = 0
        torch.autograd.grad(out, (q, k, v), torch.empty_like(out))


def plain_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """softmax(q kᵀ / sqrt(d) + mask) v, each operator by itself and the softmax in fp32.

    Args:
        q: [B, heads, S, d].
        k: [B, heads, T, d], or fewer heads that divide those of `q`.
        v: As `k`.
        causal: Whether a query sees no later key.
    """
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.matmul(q, k.transpose(-2, -1)) * q.shape[-1] ** -0.5
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    return torch.matmul(scores.float().softmax(-1).to(q.dtype), v)


@lru_cache(maxsize=1)
def _table() -> dict[Any, Callable[..., Any]]:
    return get_decompositions([getattr(torch.ops.aten, name) for name in COMPOUND])


def _describe(x: Any) -> Any:
    return Description(tuple(x.shape), x.stride(), x.dtype) if isinstance(x, Tensor) else x


def _meta(x: Any) -> Any:
    if isinstance(x, Description):
        return torch.empty_strided(x.size, x.stride, dtype=x.dtype, device="meta")
    return x
