"""Whether steps go on while a checkpoint is written, as each file says it or its software does it
by itself.
"""

from types import ModuleType
from typing import Any

import pytest

from tests.interop.foreign_samples import GPU_NAME, left
from workbench.interop.gpt_neox import read_gpt_neox
from workbench.interop.megatron import read_megatron
from workbench.interop.torchtitan import read_torchtitan
from workbench.interop.translation import Imported, ImportOptions

ON_8 = ImportOptions("llama-3-8b", GPU_NAME, 8)
WORDS = """torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 4
 --hidden-size 256 --num-attention-heads 4 --seq-length 512 --max-position-embeddings 512
 --micro-batch-size 1 --global-batch-size 8 --lr 1e-4 --bf16
 --vocab-size 1000 --train-iters 10 """.replace("\n", "")


def of_megatron(more: str) -> Imported:
    return read_megatron.read(WORDS + more, ImportOptions(None, GPU_NAME))


def of_torchtitan(**checkpoint: Any) -> Imported:
    return read_torchtitan.read({"checkpoint": checkpoint}, ON_8)


def test_megatron_waits_without_async_save() -> None:
    assert of_megatron("--save-interval 5").plan.checkpoint.asynchronous is False
    found = of_megatron("--save-interval 5 --async-save")
    assert found.plan.checkpoint.asynchronous and "--async-save" in found.translated


@pytest.mark.parametrize(
    "mode, wanted", [("disabled", False), ("async", True), ("async_with_pinned_mem", True)]
)
def test_torchtitan_says_it_in_async_mode(mode: str, wanted: bool) -> None:
    found = of_torchtitan(enable=True, interval=5, async_mode=mode)
    assert (
        found.plan.checkpoint.asynchronous == wanted and "checkpoint.async_mode" in found.translated
    )
    assert of_torchtitan(enable=True, interval=5).plan.checkpoint.asynchronous is False
    off = of_torchtitan(enable=False, async_mode=mode)
    assert "checkpoint.async_mode" in left(off)


def test_gpt_neox_waits() -> None:
    assert read_gpt_neox.read({"checkpoint_factor": 5}, ON_8).plan.checkpoint.asynchronous is False


@pytest.mark.parametrize("wanted", [True, False])
@pytest.mark.parametrize("software", [read_megatron, read_torchtitan])
def test_it_comes_back_from_what_is_written(software: ModuleType, wanted: bool) -> None:
    plan = of_torchtitan(enable=True, interval=5).plan.replace(
        **{"checkpoint.asynchronous": wanted}
    )
    written = software.write(plan)
    assert "checkpoint.asynchronous" not in {note.field for note in written.untranslated}
    back = software.read(
        written.text,
        ImportOptions(None if software is read_torchtitan else "llama-3-8b", GPU_NAME, 8),
    )
    assert back.plan.checkpoint.asynchronous == wanted


def test_how_many_checkpoints_are_kept_is_said_or_told() -> None:
    for found in (
        of_megatron("--save-interval 5"),
        read_gpt_neox.read({"checkpoint_factor": 5}, ON_8),
        of_torchtitan(enable=True, interval=5),
    ):
        noted = {note.field: note.value for note in found.assumed}
        assert noted["checkpoint.keep"] == found.plan.resolve().checkpoint.keep
    assert of_torchtitan(enable=True, keep_latest_k=3).plan.checkpoint.keep == 3
    assert "checkpoint.keep" not in {note.field for note in of_megatron("").assumed}
