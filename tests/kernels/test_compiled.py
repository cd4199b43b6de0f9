"""Plain operators under torch.compile: when they are compiled, and where."""

import logging
from pathlib import Path

import pytest
import torch
from torch import Tensor

from workbench.engine.verify.forked_ranks import run_ranks
from workbench.kernels.backends.compiled_reference import torch_compiled


@torch_compiled
def _square(x: Tensor) -> Tensor:
    return x * x + 1


@pytest.mark.slow
def test_a_process_forked_after_compiling_can_compile(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def ranks_own(rank: int) -> list[float]:
        return _square(torch.arange(3, dtype=torch.float64)).tolist()

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    assert _square(torch.arange(3.0)).tolist() == [1, 2, 5]
    assert run_ranks(1, ranks_own) == [[1, 2, 5]]


def test_every_layout_has_code_of_its_own_whatever_its_size(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="workbench.kernels.backends.compiled_reference")
    for said, x in enumerate((torch.rand(5, 7, 3), torch.rand(3, 5, 7).transpose(0, 2)), 1):
        for part in (x, x.repeat(2, 1, 1) if x.is_contiguous() else x[:4]):
            torch.testing.assert_close(_square(part), part * part + 1)
        assert len([r for r in caplog.records if "_square" in r.message]) == said
