"""Tracing a user's module by `torch.export` (non-strict, training IR) into operators.

Exported shapes are constants, so that a module is traced at the shape of a microbatch. Parameters
are fake while it is traced: of the wanted dtype, on the CPU, without bytes.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor, nn
from torch.export import export

from workbench.errors import PlanError, refuse
from workbench.models.torch_dispatch import FakeTensor, FakeTensorMode, without_dispatch_modes
from workbench.models.traced.exported_graph import graph_of, writes_in_place
from workbench.models.traced.tracing_contexts import fake_parameters, quiet, without_values_of_masks
from workbench.models.traced.users_frame import users_frame
from workbench.models.traced.value_dependence import place_and_error, value_dependent
from workbench.plan.operators.traced.traced_graph import TracedGraph

_Trace = tuple[TracedGraph, dict[str, Tensor]]
_kept: ContextVar[dict[tuple[int, int, torch.dtype, bool], _Trace] | None] = ContextVar(
    "kept", default=None
)


@contextmanager
def one_module() -> Iterator[None]:
    """Within it all modules that are traced are alike, as those of all ranks of a plan: each shape
    is traced once.
    """
    before = _kept.set({})
    try:
        yield
    finally:
        _kept.reset(before)


def trace_module(
    model: nn.Module, sequences: int, length: int, dtype: torch.dtype, with_loss: bool
) -> _Trace:
    """Trace a module in training mode.

    Args:
        model: Its forward takes tokens, or (tokens, targets) for the summed loss; it is not
            changed.
        sequences: Of a microbatch.
        length: Tokens of a sequence.
        dtype: Of floating-point parameters and buffers.
        with_loss: Whether its forward takes targets and returns the loss.

    Returns:
        The graph, and its constants by id.

    Raises:
        PlanError: It cannot be traced; names the line of the user's code.
    """
    key, kept = (sequences, length, dtype, with_loss), _kept.get()
    if kept is None or key not in kept:
        with without_dispatch_modes():  # a rehearsal's tensors are fake already, in another way
            traced = _traced(model, sequences, length, dtype, with_loss)
        if kept is not None:
            kept[key] = traced
    else:
        traced = kept[key]
    graph, constants = traced
    return graph, {key: _of_this_mode(value) for key, value in constants.items()}


def _of_this_mode(constant: Tensor) -> Tensor:
    """A constant; one that had no values, as of a module on the meta device, is zero, and fake
    where the caller's tensors are.
    """
    if not isinstance(constant, FakeTensor):
        return constant
    return torch.zeros(constant.shape, dtype=constant.dtype)


def _traced(
    model: nn.Module, sequences: int, length: int, dtype: torch.dtype, with_loss: bool
) -> _Trace:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        inputs = tuple(
            torch.zeros(sequences, length, dtype=torch.long) for _ in range(1 + with_loss)
        )
    with fake_parameters(model, mode, dtype), quiet(), without_values_of_masks():
        try:
            program = export(model, inputs, strict=False)
            if writes_in_place(program):
                program = program.run_decompositions({})  # operators that write in place are gone
        except PlanError:
            raise
        except (Exception, SystemExit) as error:  # a user's module may do either
            raise _untraceable(error, sequences, length) from error
    return graph_of(program, model, with_loss)


def _untraceable(error: BaseException, sequences: int, length: int) -> PlanError:
    """That a module cannot be traced, or that its forward fails, traced or not: where, and why.

    What the user's own line raises is of the forward; of what torch raises there, no error says
    whether it is of tracing (a tensor's values are asked for) or not (shapes do not fit).
    """
    frame, why = users_frame(error), place_and_error(error)
    if frame and traceback.extract_tb(error.__traceback__)[-1] == frame:
        legal = f"a forward that returns for tokens [{sequences}, {length}]"
        return refuse("model.python", f"its forward fails: {why}; legal: {legal}")
    return value_dependent("traced", why)
