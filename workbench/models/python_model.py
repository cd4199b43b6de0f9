"""A user's own model: built by their factory, checked, given a loss if it returns logits."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workbench.errors import PlanError, Problem, refuse
from workbench.models.seams import IGNORE_INDEX, at_least_fp32
from workbench.models.traced.users_frame import users_frame
from workbench.plan.schema import PythonModel
from workbench.untrusted_text import brief

CHANNEL_DROPOUT_MODULES = (
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)
DROPOUT_MODULES = (nn.Dropout, *CHANNEL_DROPOUT_MODULES)
BATCH_STATISTICS_MODULES = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
Forward = Callable[..., Any]


def build_python_model(model: PythonModel, seed: int) -> nn.Module:
    """Build the module that the user's factory returns, with its own initial weights.

    This runs the user's code, and may be called only where the user has allowed it
    (`--allow-code`).

    Args:
        model: Where the factory is, and its arguments.
        seed: Of torch's generator while the factory runs, so that all ranks draw the same weights.

    Raises:
        PlanError: If the factory is not found or fails, or if the module would not train alike on
            every mesh.
    """
    if os.getcwd() not in sys.path:
        # Not on the path before: code in the current folder runs only where the user allows it.
        sys.path.insert(0, os.getcwd())
    name, _, factory = model.python.partition(":")
    field = f"'{model.python}'"
    try:
        function = getattr(importlib.import_module(name), factory)
    except (ImportError, AttributeError) as error:
        raise refuse(
            "model.python",
            f"{field} is not found ({brief(str(error))}{_without_suffix(name, factory)}); legal: a "
            "module that can be imported from the current folder or the Python path, and a "
            "function in it",
        ) from error
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            built = function(**model.args)
        except TypeError as error:
            raise refuse(
                "model.args", f"{field} was called with {sorted(model.args)}: {error}"
            ) from error
        except PlanError:
            raise
        except Exception as error:  # a user's factory may raise any
            raise _failed(field, error) from error
    if not isinstance(built, nn.Module):
        raise refuse("model.python", f"{field} returns {type(built).__name__}; legal: an nn.Module")
    if problems := list(_mesh_dependent(built)):
        raise PlanError(problems)
    return built


def _without_suffix(name: str, factory: str) -> str:
    """How a module is named that was written as its file, and whether there is such a file."""
    module = name.removesuffix(".py")
    if module == name:
        return ""
    file = Path(*module.split(".")).with_suffix(".py")
    there = "is" if file.is_file() else "is not"
    return (
        f"; a module is named without .py, here '{module}:{factory}', and {file} {there} in the "
        "current folder"
    )


def _failed(field: str, error: Exception) -> PlanError:
    """That a factory raised: where, and what."""
    frame = users_frame(error)
    where = f" at {frame.filename}:{frame.lineno}" if frame else ""
    said = f"{type(error).__name__}: {brief(str(error))}"
    return refuse("model.python", f"{field} fails{where} ({said}); legal: a factory that returns")


def returns_loss(model: nn.Module) -> bool:
    """Whether forward takes (tokens, targets) and returns the summed loss, or tokens for logits."""
    parameters = inspect.signature(model.forward).parameters.values()
    needed = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return len(needed) > 1 and (
        needed[1].name == "targets" or needed[1].default is inspect.Parameter.empty
    )


def add_loss(model: nn.Module, vocab: int) -> nn.Module:
    """Give the module, in place, forward(tokens [B, T], targets [B, T]) -> loss summed over
    tokens, which raises `PlanError` where the module's own returns something else.

    Args:
        model: Its forward returns that loss, or of tokens alone the logits.
        vocab: Tokens, each with a logit.
    """
    add = _checked_loss if returns_loss(model) else _with_loss
    model.forward = add(model.forward, vocab)
    return model


def _checked_loss(forward: Forward, vocab: int) -> Forward:
    def checked(tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        loss = forward(tokens_BT, targets_BT)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise other_output(_said(loss), "the summed loss, one number")
        return loss

    return checked


def _with_loss(forward: Forward, vocab: int) -> Forward:
    def summed(tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        found = forward(tokens_BT)
        fits = isinstance(found, Tensor) and found.shape[:-1] == tokens_BT.shape
        if not fits or found.shape[-1] < vocab:
            wanted = f"logits {[*tokens_BT.shape, vocab]}"
            raise other_output(
                _said(found), f"{wanted}, or of forward(tokens, targets) the summed loss"
            )
        logits_NV = at_least_fp32(found.flatten(0, -2))
        return F.cross_entropy(
            logits_NV, targets_BT.flatten(), reduction="sum", ignore_index=IGNORE_INDEX
        )

    return summed


def _said(output: Any) -> str:
    """What a forward returns, in words."""
    kind = "None" if output is None else f"a {type(output).__name__}"
    return f"a tensor {list(output.shape)}" if isinstance(output, Tensor) else kind


def other_output(said: str, legal: str) -> PlanError:
    """That a forward returned something else."""
    return refuse("model.python", f"its forward returns {said}; legal: {legal}")


def dropout_modules(model: nn.Module) -> Iterator[str]:
    """Paths of the modules that drop at a rate above 0."""
    for path, module in model.named_modules():
        rate = module.p if isinstance(module, DROPOUT_MODULES) else getattr(module, "dropout", 0.0)
        if isinstance(rate, float) and rate > 0:
            yield path


def _mesh_dependent(model: nn.Module) -> Iterator[Problem]:
    """Modules and parameters that would not train on several ranks as on one device."""
    for path, module in model.named_modules():
        if isinstance(module, CHANNEL_DROPOUT_MODULES) and module.p > 0:
            what = f"{path or 'the model'} drops channels, drawn otherwise on every rank"
            yield Problem("model.python", f"{what}; legal: nn.Dropout, or rate 0.0")
        if isinstance(module, BATCH_STATISTICS_MODULES):
            yield Problem(
                "model.python",
                f"{path} is a {type(module).__name__}, whose statistics are of one rank's "
                "sequences; legal: LayerNorm, RMSNorm, GroupNorm",
            )
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            yield Problem(
                "model.python",
                f"{name} is frozen, and every parameter is trained; legal: requires_grad",
            )
        if parameter.is_complex():
            yield Problem(
                "model.python",
                f"{name} is of complex numbers ({parameter.dtype}), which no optimizer here steps; "
                "legal: real parameters, seen by torch.view_as_complex",
            )
    if next(model.parameters(), None) is None:
        yield Problem("model.python", "the model has no parameters; legal: one or more")
