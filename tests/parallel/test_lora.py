"""Low-rank adapters train under every axis as on one device, and nothing else does."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.test_session_checkpoint import session_of
from tests.parallel.family_table import CONFIGS
from tests.parallel.small import GPT, LLAMA, plan
from tests.parallel.test_equality import assert_equal_to_one_device
from tests.parallel.test_mutations import failure_of
from workbench.adapters.lora_linear import LoraAdapter, adapters_disabled, add_adapters, is_adapter
from workbench.engine.session import Session
from workbench.engine.session_checkpoint import SessionCheckpointer
from workbench.engine.verify.equivalence import verify
from workbench.engine.verify.single_device import verification_weight
from workbench.errors import PlanError
from workbench.kernels.fused_seams import FusedDropout
from workbench.models import Transformer
from workbench.models.counter_dropout import Dropout
from workbench.parallel.expert import apply_expert
from workbench.parallel.layout import Layout
from workbench.parallel.lora.apply_lora import apply_lora
from workbench.plan.catalog.huggingface_config import shape_of
from workbench.plan.model.block_linears import adapted_linears, model_linears
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.schema import Lora

LORA: dict[str, Any] = {"finetune.lora": {"rank": 3, "alpha": 5.0, "dropout": 0.2}}
DENSE: dict[str, Any] = {"finetune.lora": {"rank": 3, "alpha": 5.0}}
MOE, MLA = (
    shape_of({"model_type": name, **CONFIGS[name]}).model_dump(exclude_unset=True)
    for name in ("mixtral", "deepseek_v3")
)
S, D = "strategy.", "strategy.data."
SEQUENCE = {S + "tensor.sequence": True}
MESHES: dict[str, tuple[tuple[int, int, int], dict[str, Any], dict[str, Any]]] = {
    "data": ((1, 1, 2), LLAMA, {}),
    "zero-1": ((1, 1, 3), LLAMA, {D + "zero": 1}),
    "zero-2": ((1, 1, 2), LLAMA, {D + "zero": 2, D + "reduce": "microbatch"}),
    "zero-3": ((1, 1, 2), LLAMA, {D + "zero": 3}),
    "hybrid": ((1, 1, 4), LLAMA, {D + "zero": 3, D + "shard": 2}),
    "offload": ((1, 1, 2), LLAMA, {D + "zero": 3, D + "offload": "parameters"}),
    "recompute": ((1, 1, 2), LLAMA, {D + "zero": 3, S + "recompute": "full"}),
    "tensor": ((2, 1, 1), GPT, {}),
    "shared-heads": ((4, 1, 1), LLAMA, {}),
    "uneven-heads": ((3, 1, 1), LLAMA, {**SEQUENCE, "training.sequence_length": 18}),
    "sequence": ((2, 1, 1), LLAMA, SEQUENCE),
    "1f1b": ((1, 2, 1), GPT, {"model.tied": True}),
    "interleaved": (
        (1, 2, 1),
        LLAMA,
        {S + "pipeline.schedule": "interleaved", S + "pipeline.chunks": 2},
    ),
    "zero-bubble": ((2, 2, 1), LLAMA, {S + "pipeline.schedule": "zb-h1"}),
    "ring": ((1, 1, 2), LLAMA, {S + "context.size": 2, "training.global_batch": 8}),
    "3d": ((2, 2, 2), LLAMA, {**SEQUENCE, D + "zero": 1}),
}
EXPERTS: dict[str, tuple[tuple[int, int, int], dict[str, Any], dict[str, Any]]] = {
    "expert": ((1, 1, 2), MOE, {S + "expert.size": 2}),
    "tensor": ((2, 1, 1), MOE, {}),
    "expert-tensor": ((2, 1, 2), MOE, {**SEQUENCE, S + "expert.size": 2, D + "zero": 3}),
    "latent": ((2, 1, 1), MLA, SEQUENCE),
}


@pytest.mark.drawn(6)
@pytest.mark.parametrize("name", MESHES)
def test_adapters_train_as_on_one_device(name: str) -> None:
    mesh, shape, changes = MESHES[name]
    assert_equal_to_one_device(verify(plan(*mesh, shape=shape, changes={**LORA, **changes})))


@pytest.mark.drawn(2)
@pytest.mark.parametrize("name", EXPERTS)
def test_adapters_of_experts_train_as_on_one_device(name: str) -> None:
    mesh, shape, changes = EXPERTS[name]
    assert_equal_to_one_device(verify(plan(*mesh, shape=shape, changes={**DENSE, **changes})))


@pytest.mark.parametrize(
    "targets",
    [["blocks.3.attention.[qv]"], ["blocks.0.mlp.down", "blocks.0.attention.k"]],
    ids=["last", "first"],
)
def test_layers_without_adapters_have_no_backward_of_their_own(targets: list[str]) -> None:
    changes = {**LORA, "finetune.lora.targets": targets}
    assert_equal_to_one_device(verify(plan(1, 2, shape=GPT, changes=changes)))


def test_a_gradient_that_is_not_summed_over_tensor_ranks_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(apply_expert, "_is_shared_by_columns_or_rows", lambda name, layouts: False)
    assert is_adapter(failure_of(verify(plan(2, changes=DENSE)))["tensor"])


def with_adapters(dropout: float) -> Session:
    """A session of weights whose adapters change the output."""
    session = session_of(plan(changes={**LORA, "finetune.lora.dropout": dropout}).resolve(), 0)
    with torch.no_grad():
        for name, parameter in session.part.stages[0].named_parameters():
            weight = verification_weight(name, tuple(parameter.shape), 0, torch.float64)
            parameter.copy_(weight)
    return session


def test_evaluation_drops_nothing_of_an_adapters_input() -> None:
    dropping, other = with_adapters(0.5), with_adapters(0.0)
    tokens = torch.arange(128).view(4, 2, 16)
    assert torch.equal(dropping.evaluate(tokens, tokens), other.evaluate(tokens, tokens))
    assert dropping.step(0, tokens, tokens).loss != other.step(0, tokens, tokens).loss


def test_adapters_drop_by_one_kernel_on_a_gpu() -> None:
    made = plan(changes=LORA).resolve()
    with torch.device("meta"):
        model = Transformer(made.shape)
    layouts = {
        f"{path}.weight": Layout.unsharded(f"{path}.weight", tuple(module.weight.shape))
        for path, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
    }
    assert made.lora is not None
    apply_lora(model, layouts, made.lora, 0, "fused", "cuda")
    kinds = {type(x) for x in model.modules() if isinstance(x, Dropout) and x.rate}
    assert kinds == {FusedDropout}


def test_full_fine_tuning_is_training() -> None:
    assert_equal_to_one_device(verify(plan(1, 1, 2, changes={"finetune.method": "full"})))


def adapted_model(lora: Lora) -> Transformer:
    model = Transformer(plan(shape=GPT).resolve().shape).double()
    add_adapters(model, lora, 0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(verification_weight(name, tuple(parameter.shape), 0, torch.float64))
    return model


@pytest.mark.parametrize(("rslora", "scale"), [(False, 5 / 4), (True, 5 / 2)])
def test_an_adapter_is_a_change_of_its_weight_by_s_b_a(rslora: bool, scale: float) -> None:
    model = adapted_model(Lora(rank=4, alpha=5.0, rslora=rslora))
    tokens = torch.arange(12).view(1, 12)
    found = model(tokens, tokens.flip(-1))
    with adapters_disabled():
        base = model(tokens, tokens.flip(-1))
    merged = Transformer(model.shape).double()
    own = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in merged.named_parameters():
            parameter.copy_(own[name])
        assert torch.allclose(merged(tokens, tokens.flip(-1)), base, rtol=1e-14)
        for path in model_linears(model.shape):
            delta = own[f"{path}.lora_b"] @ own[f"{path}.lora_a"]
            merged.get_parameter(f"{path}.weight").add_(scale * delta)
        assert torch.allclose(merged(tokens, tokens.flip(-1)), found, rtol=1e-12)
    assert not torch.allclose(base, found, rtol=1e-3)


def test_patterns_choose_layers() -> None:
    shape = plan(shape=GPT).resolve().shape
    lora = Lora(targets=["attention.[qv]", "blocks.0.mlp.*"])
    names = list(adapted_linears(shape, lora))
    assert names[:4] == [
        f"blocks.0.{x}" for x in ("attention.q", "attention.v", "mlp.up", "mlp.down")
    ]
    assert len(names) == 2 * shape.layers + 2


@pytest.mark.parametrize(
    ("changes", "field", "says"),
    [
        ({"finetune.lora.targets": ["attention.q", "w1"]}, "targets", "'w1' matches no linear"),
        ({"finetune.lora.rank": 33}, "rank", "more than the rank of blocks.0"),
        ({"finetune.method": "full", "finetune.lora.rank": 2}, "lora", "trains every weight"),
        ({**LORA, S + "recompute": ["blocks.1.mlp"]}, "dropout", "recomputed by itself"),
        ({**LORA, "model": MOE}, "dropout", "rows are not dropped"),
    ],
)
def test_adapters_that_cannot_be_are_refused(
    changes: dict[str, Any], field: str, says: str
) -> None:
    with pytest.raises(PlanError, match=says) as error:
        plan(changes=changes).resolve()
    assert error.value.problems[0].field == f"finetune.lora.{field}".replace("lora.lora", "lora")


def stepped(session: Session, steps: range) -> list[float]:
    made = session.plan
    losses = []
    for index in steps:
        text = torch.randint(
            257,
            (made.num_microbatches, 2, made.training.sequence_length),
            generator=torch.Generator().manual_seed(index),
        )
        losses.append(session.step(index, text, text.flip(-1)).loss.item())
    return losses


def test_a_checkpoint_holds_adapters_and_resumes_to_the_bit(tmp_path: Path) -> None:
    changes = {**LORA, D + "zero": 3, S + "precision": "bf16"}
    made = plan(changes=changes).resolve()
    session = session_of(made, 0)
    store = session.part.store
    assert all(is_adapter(name) for name in store.values)
    assert not any(map(is_adapter, store.frozen_values))
    assert set(session.optimizer.state()) == set(store.values)
    stepped(session, range(2))
    saver = SessionCheckpointer(session, tmp_path)
    path = saver.save(2)
    saver.wait()
    saver.close()
    losses = stepped(session, range(2, 4))
    again = session_of(resumed(made, path), 0)
    assert SessionCheckpointer(again, tmp_path / "other").load() == 2
    assert stepped(again, range(2, 4)) == losses
    for name, value in session.part.store.values.items():
        assert torch.equal(value, again.part.store.values[name])


def test_a_checkpoint_of_other_adapters_is_refused(tmp_path: Path) -> None:
    made = plan(changes=DENSE).resolve()
    session = session_of(made, 0)
    saver = SessionCheckpointer(session, tmp_path)
    path = saver.save(0)
    saver.wait()
    saver.close()
    other = resumed(made, path).with_fields(**{"finetune.lora.alpha": 7.0})
    with pytest.raises(PlanError, match=r"finetune.lora.alpha: is 7.0, .* was written with 5.0"):
        SessionCheckpointer(session_of(other, 0), tmp_path / "other").load()


def resumed(made: ResolvedPlan, path: Path) -> ResolvedPlan:
    return made.with_fields(**{"checkpoint.load": str(path)})


def test_a_switch_of_adapters_is_of_its_context() -> None:
    adapter = adapted_model(Lora(rank=2)).get_submodule("blocks.0.attention.q").lora
    assert isinstance(adapter, LoraAdapter) and adapter.active
    with adapters_disabled():
        assert not adapter.active
    assert adapter.active
