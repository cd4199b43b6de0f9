"""Chains under torch.compile: what a fork of a process that has compiled can do."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from workbench.engine.forked import run_ranks
from workbench.kernels.compiled import compiled


@compiled
def _square(x: Tensor) -> Tensor:
    return x * x + 1


def test_a_process_forked_after_compiling_can_compile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def ranks_own(rank: int) -> list[float]:
        return _square(torch.arange(3, dtype=torch.float64)).tolist()

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    assert _square(torch.arange(3.0)).tolist() == [1, 2, 5]
    assert run_ranks(1, ranks_own) == [[1, 2, 5]]
