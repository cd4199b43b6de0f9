"""A run's own adapters: merged they evaluate as the run does, and a run goes on from them."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import workbench as wb
from tests.checkpoint.test_session_checkpoint import save, session_of
from tests.parallel.small import LLAMA, plan
from workbench.adapters.peft_config import read_peft_config
from workbench.checkpoint.resume_point import ADAPTER_CONFIG
from workbench.engine.export.export_adapter import export_adapter
from workbench.engine.export.export_weights import export_checkpoint
from workbench.engine.session import Session
from workbench.engine.session_checkpoint import SessionCheckpointer
from workbench.engine.verify.forked_ranks import RankError, run_ranks
from workbench.errors import PlanError
from workbench.plan.base_weights import base_sha256
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.runs.launch.preflight import preflight

SHAPE = {**LLAMA, "ffn": 64}
BATCH = {"training.global_batch": 8}
LORA: dict[str, Any] = {
    "finetune.lora": {"rank": 3, "alpha": 5.0, "rslora": True},
    "training.optimizer.learning_rate": 0.1,
}
FOUR_BIT = {"finetune.quantize": {"format": "nf4", "group": 32}}
ZERO_3 = {"strategy.data.zero": 3}


def tuned(base: Path, data: int = 1, **changes: Any) -> ResolvedPlan:
    given = {**BATCH, **LORA, "finetune.base": str(base), **changes}
    given["finetune.base_sha256"] = base_sha256(base)
    return plan(1, 1, data, shape=SHAPE, changes=given).resolve()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder."""
    folder = tmp_path_factory.mktemp("base")
    run_ranks(1, partial(save, plan(shape=SHAPE, changes=BATCH).resolve(), folder))
    export_checkpoint(folder / "checkpoints" / "step-00000001", folder / "weights")
    return folder / "weights"


def tokens(session: Session) -> tuple[Tensor, Tensor]:
    t, data = session.plan.training, session.mesh["data"]
    shape = (data.size * session.plan.num_microbatches, t.micro_batch, t.sequence_length)
    random = torch.Generator().manual_seed(2)
    text = torch.randint(257, shape, generator=random).chunk(data.size)[data.index]
    return text, text.flip(-1)


def train(made: ResolvedPlan, folder: Path, rank: int) -> float:
    """Two steps and a checkpoint; the loss then."""
    session = session_of(made, rank)
    saver = SessionCheckpointer(session, folder)
    saver.load()
    for step in range(2):
        session.step(step, *tokens(session))
    saver.save(2)
    saver.wait()
    return loss_of(session)


def loss_of(session: Session) -> float:
    found = session.evaluate(*tokens(session))
    assert found is not None
    if session.mesh.world_size > 1:
        torch.distributed.all_reduce(found)
    return float(found)


def loaded_loss(made: ResolvedPlan, rank: int) -> float:
    session = session_of(made, rank)
    SessionCheckpointer(session, Path("unused")).load()
    return loss_of(session)


@pytest.mark.parametrize("stored", [{}, FOUR_BIT], ids=["fp32", "nf4"])
def test_merged_weights_evaluate_as_the_run_did(
    stored: dict[str, Any], base: Path, tmp_path: Path
) -> None:
    made = tuned(base, 2, **stored, **ZERO_3)
    trained = run_ranks(2, partial(train, made, tmp_path))[0]
    path = tmp_path / "checkpoints" / "step-00000002"
    export_checkpoint(path, tmp_path / "merged", base=base)
    losses = [
        loaded_loss(plan(shape=SHAPE, changes={**BATCH, "checkpoint.load": str(it)}).resolve(), 0)
        for it in (tmp_path / "merged", base)
    ]
    assert losses[0] == pytest.approx(trained, rel=1e-6)
    assert abs(losses[1] - trained) > 1e-4 * trained
    export_adapter(path, tmp_path / "adapter", base)
    goes_on = tuned(base, 2, **stored, **ZERO_3, **initial(tmp_path / "adapter"))
    assert run_ranks(2, partial(loaded_loss, goes_on))[0] == pytest.approx(trained, rel=1e-6)


def initial(folder: Path) -> dict[str, Any]:
    return {"finetune.lora.initial": str(folder)}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"finetune.lora.rank": 2}, "finetune.lora.rank: is 2; '{}' has rank 3 of blocks.0"),
        ({"finetune.lora.alpha": 10.0}, "finetune.lora.alpha: is 10, which scales adapters by 5.7"),
        ({"finetune.lora.rslora": False}, "finetune.lora.alpha: is 5, which scales adapters by 1."),
        ({"finetune.lora.targets": "attention"}, "is attention; '{}' has adapters of blocks.0.mlp"),
        (
            initial(Path("none")),
            "finetune.lora.initial: 'none' holds no adapters; legal: a folder that holds",
        ),
    ],
)
def test_initial_adapters_that_a_plan_does_not_train_are_refused(
    changes: dict[str, Any], words: str, base: Path, tmp_path: Path
) -> None:
    train(tuned(base), tmp_path, 0)
    folder = tmp_path / "adapter"
    export_adapter(tmp_path / "checkpoints" / "step-00000002", folder, base)
    with pytest.raises(ValueError) as refused:
        loaded_loss(tuned(base, **{**initial(folder), **changes}), 0)
    assert words.format(folder) in str(refused.value), refused.value
    assert not isinstance(refused.value, RankError)


def test_a_folder_without_adapters_is_refused_before_a_launch(base: Path, tmp_path: Path) -> None:
    made = tuned(base, **initial(base), **{"corpus.source": __file__})
    (found,) = (it for it in preflight(made, root=tmp_path, force=True) if "lora" in it.field)
    assert str(found).startswith(f"finetune.lora.initial: '{base}' holds no adapters; legal")


def test_adapters_by_name_are_legal_in_place_of_their_folder(base: Path, tmp_path: Path) -> None:
    named = tmp_path / "adapters"
    for name in ("one", "two"):
        (named / name).mkdir(parents=True)
        (named / name / ADAPTER_CONFIG).write_text("{}")
    made = tuned(base, **initial(named), **{"corpus.source": __file__})
    (found,) = (it for it in preflight(made, root=tmp_path, force=True) if "lora" in it.field)
    legal = f"legal: '{named}/one' or '{named}/two'"
    assert str(found) == f"finetune.lora.initial: '{named}' holds no adapters; {legal}, or null"
    with pytest.raises(PlanError, match=re.escape(f"'{named}' holds adapters by name; {legal}")):
        wb.weights(named, tmp_path / "merged", merge=True, base=base)
    with pytest.raises(PlanError, match=re.escape(f"'{named}' holds no adapters; {legal}")):
        read_peft_config(named, "--adapter")
