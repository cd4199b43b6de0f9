"""What is changed while a module is traced: its parameters are fake, and torch prints nothing."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn.modules import transformer

from workbench.models.torch_dispatch import FakeTensorMode


@contextmanager
def quiet() -> Iterator[None]:
    """Without the graph and the warnings that torch prints where it cannot trace."""
    before = logging.root.manager.disable
    logging.disable()  # torch's loggers have handlers each of their own
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def without_values_of_masks() -> Any:
    """`nn.TransformerEncoder` compares the values of its mask with a causal one, to take a faster
    kernel. Traced it takes the caller's word (`is_causal`); the mask is applied in any case.
    """

    def is_causal(mask: Any, is_causal: bool | None = None, size: int | None = None) -> bool:
        return bool(is_causal)

    return patch.object(transformer, "_detect_is_causal_mask", is_causal)


@contextmanager
def fake_parameters(model: nn.Module, mode: FakeTensorMode, dtype: torch.dtype) -> Iterator[None]:
    """Give the module fake parameters and buffers meanwhile; tied ones stay tied. Plain attributes
    without values become fake in their own dtype.
    """
    known: dict[int, Tensor] = {}
    kept: list[tuple[dict[str, Any], str, Tensor]] = []

    def fake(value: Tensor, own_dtype: bool) -> Tensor:
        if id(value) not in known:
            kind = value.dtype if own_dtype or not value.is_floating_point() else dtype
            with mode:
                empty = torch.empty(value.shape, dtype=kind)
            trained = isinstance(value, nn.Parameter)
            known[id(value)] = nn.Parameter(empty) if trained else empty
        return known[id(value)]

    try:
        for module in model.modules():
            tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
            for table in (*tables, vars(module)):
                plain = table is vars(module)
                for name, value in list(table.items()):
                    if isinstance(value, Tensor) and (not plain or value.is_meta):
                        kept.append((table, name, value))
                        table[name] = fake(value, plain)
        yield
    finally:
        for table, name, value in kept:
            table[name] = value
