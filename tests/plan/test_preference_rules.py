"""What direct preference optimization asks of a plan."""

from typing import Any

import pytest

from tests.parallel.small import plan
from workbench.errors import PlanError
from workbench.plan.schema import Plan

PAIRS: dict[str, Any] = {"finetune.preference": {}, "corpus.format": "preferences"}


def test_the_default_micro_batch_is_a_pair() -> None:
    written = {"model": "tiny-gpt", "cluster": {"gpu": "local", "gpus": 2}}
    written["corpus"] = {"format": "preferences"}
    resolved = Plan.model_validate(written | {"finetune": {"preference": {}}}).resolve()
    assert resolved.training.micro_batch == 2 and resolved.training.global_batch == 16
    assert resolved.finetune is not None and resolved.finetune.preference is not None
    assert resolved.finetune.preference.beta == 0.1


@pytest.mark.parametrize(
    ("changes", "field", "message"),
    [
        ({"finetune.micro_batch": 3, "finetune.global_batch": 6}, "micro_batch", "e.g. 2 or 4"),
        ({"finetune.micro_batch": 1}, "micro_batch", "is 1, .* e.g. 2$"),
        ({"corpus.format": "messages"}, "finetune.preference", "stdlib holds messages; legal: "),
        ({"corpus.format": None}, "finetune.preference", "stdlib holds text; legal: corpus.format"),
        ({"strategy.stack": "megatron"}, "strategy.stack", "legal: 'workbench'"),
        ({"finetune.dropout": 0.2}, "finetune.dropout", "is 0.2 .*; legal: 0"),
        ({"finetune.lora": {"dropout": 0.1}}, "finetune.lora.dropout", "is 0.1 .*; legal: 0"),
    ],
)
def test_what_splits_a_pair_or_adds_noise_is_refused(
    changes: dict[str, Any], field: str, message: str
) -> None:
    with pytest.raises(PlanError, match=message) as error:
        plan(changes=PAIRS | changes).resolve()
    assert field in str(error.value)


def test_heads_that_sum_over_tokens_are_refused() -> None:
    grid = {"strategy.tensor": {"size": [2, 2], "algorithm": "2d"}}
    with pytest.raises(PlanError, match=r"strategy\.tensor\.algorithm: is '2d' beside finetune"):
        plan(4, changes=PAIRS | grid).resolve()
    operators = {"strategy.operators": {"blocks.*.mlp.up": "((1,),(2,))"}}
    with pytest.raises(PlanError, match=r"strategy\.operators: is 'set'.*; legal: only without it"):
        plan(2, changes=PAIRS | operators).resolve()


def test_packed_chats_are_refused_by_what_the_plan_says() -> None:
    with pytest.raises(PlanError) as refused:
        plan(changes=PAIRS | {"corpus.format": "messages"}).resolve()
    assert [one.field for one in refused.value.problems] == ["finetune.preference"]
