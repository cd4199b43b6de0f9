"""A collective call in the words of the collectives frame, whoever saw it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import GroupName, _resolve_process_group

from workbench.parallel.async_collectives import CompositeCollective

if not "2.11" <= torch.__version__ < "2.14":
    raise ImportError(
        f"workbench.engine.measure.recorded_collective uses torch's private process groups of 2.11 "
        f"to 2.13, not {torch.__version__}"
    )

KINDS = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "broadcast_": "broadcast",
    "broadcast": "broadcast",
    "reduce_": "reduce",
    "gather_": "gather",
    "scatter_": "scatter",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "all_to_all_single": "all_to_all",
    "shard_dim_alltoall": "all_to_all",
    "all_gather_single": "all_gather",
    "reduce_scatter_single": "reduce_scatter",
    "send": "send",
    "recv_": "recv",
    "recv_any_source_": "recv",
    "barrier": "barrier",
}
"""torch's operator -> kind of collective; other operators keep their name. Methods of a process
group are named without the underscore at the end.
"""

DTYPES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
}


@dataclass(frozen=True)
class RecordedCollective:
    """A collective call; `bytes` are those of the full (unsharded) tensor on one rank."""

    group: str
    kind: str
    group_size: int
    dtype: str
    bytes: int
    action: str

    def row(self, axis_of: Mapping[str, str]) -> dict[str, Any]:
        """Cells of the collectives frame, for one call.

        Args:
            axis_of: Process group's name -> mesh axis; unknown groups are `world`.
        """
        return {
            "axis": axis_of.get(self.group, "world"),
            "kind": self.kind,
            "group_size": self.group_size,
            "dtype": self.dtype,
            "bytes": self.bytes,
            "action": self.action,
            "seconds": None,
        }


def recorded_call(
    name: str, group: dist.ProcessGroup | None, sides: Sequence[Any], action: str
) -> RecordedCollective:
    """A call of an operator or a process group's method `name`, whose arguments and results are
    `sides`.
    """
    found = [list(tensors_in(side)) for side in sides]
    # The full tensor is the larger side: a gather's output, a scatter's input.
    full = max(found, key=lambda side: sum(x.nbytes for x in side), default=[])
    kind = KINDS.get(name) or KINDS.get(f"{name}_", name)
    size = 0 if kind == "barrier" else sum(x.nbytes for x in full)
    return _recorded(group, kind, full[0].dtype if full else None, size, action)


def recorded_composite(whole: CompositeCollective, action: str) -> RecordedCollective:
    """A collective composed of other ones."""
    return _recorded(whole.group, whole.kind, whole.dtype, whole.bytes, action)


def _recorded(
    group: dist.ProcessGroup | None, kind: str, dtype: torch.dtype | None, size: int, action: str
) -> RecordedCollective:
    return RecordedCollective(
        group=group.group_name if group else "",
        kind=kind,
        group_size=group.size() if group else 0,
        dtype=DTYPES.get(dtype, str(dtype).removeprefix("torch.")) if dtype else "",
        bytes=size,
        action=action,
    )


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Tensors in an operator's argument or result, nested in lists and tuples."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)


def process_group_of(args: tuple[Any, ...]) -> dist.ProcessGroup | None:
    """The process group among an operator's arguments: boxed, or named by the last string."""
    for value in args:
        if (
            isinstance(value, torch.ScriptObject)
            and "ProcessGroup" in value._type().qualified_name()
        ):
            return dist.ProcessGroup.unbox(value)
    names = [value for value in args if isinstance(value, str)]
    return _resolve_process_group(GroupName(names[-1])) if names else None
