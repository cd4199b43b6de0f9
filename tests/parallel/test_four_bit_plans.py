"""A 4-bit base under every axis: equal to one device whose weights are the dequantized ones, loaded
slice by slice, gathered as bytes.
"""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.checkpoint.test_session_checkpoint import session_of
from tests.parallel.family_table import CONFIGS
from tests.parallel.small import GPT, LLAMA, plan
from tests.parallel.test_equality import assert_equal_to_one_device
from tests.parallel.test_mutations import failure_of
from workbench.engine.session_checkpoint import SessionCheckpointer
from workbench.engine.verify.equivalence import verify
from workbench.engine.verify.forked_ranks import run_ranks
from workbench.kernels.four_bit_weight import quantize_four_bit
from workbench.parallel.data.zero_shards import ParamAndGradStore
from workbench.parallel.four_bit import fill_four_bit
from workbench.plan.catalog.huggingface_config import shape_of
from workbench.plan.model.block_linears import block_linears
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.rehearsal.rehearse import rehearse
from workbench.runtime_facts.bucket_packing import aligned_numel
from workbench.runtime_facts.four_bit_sizes import FourBitFormat

S, D, Q = "strategy.", "strategy.data.", "finetune.quantize"
NF4: dict[str, Any] = {Q: {"group": 32}, "finetune.lora": {"rank": 3, "alpha": 5.0}}
INT4: dict[str, Any] = {**NF4, Q: {"format": "int4", "group": 32, "double": False}}
WIDE = {"hidden": 64, "ffn": 128, "layers": 2}
DENSE, BIASED = {**LLAMA, **WIDE}, {**GPT, **WIDE}
UNEVEN = {**LLAMA, "layers": 2, "hidden": 96, "heads": 3, "kv_heads": 3, "ffn": 192}
MOE, MLA = (
    shape_of({"model_type": name, **CONFIGS[name]}).model_dump(exclude_unset=True) | WIDE
    for name in ("mixtral", "deepseek_v3")
)
MOE |= {"moe": {**MOE["moe"], "ffn": 64}, "head_dim": 16}
MLA["mla"] = {"kv_rank": 32, "q_rank": 32, "rope_dim": 8, "nope_dim": 24, "value_dim": 32}
MLA["moe"] = {**MLA["moe"], "ffn": 64}
SEQUENCE = {S + "tensor.sequence": True}
ZERO_3 = {D + "zero": 3}
Mesh = tuple[tuple[int, int, int], dict[str, Any], dict[str, Any]]
FAST: dict[str, Mesh] = {
    "sequence": ((2, 1, 1), BIASED, {**NF4, **SEQUENCE}),
    "zero-3": (
        (1, 1, 2),
        DENSE,
        {**INT4, **ZERO_3, D + "offload": "parameters", S + "recompute": "full"},
    ),
}
MORE: dict[str, Mesh] = {
    "zero-1": ((1, 1, 3), DENSE, {**NF4, D + "zero": 1}),
    "zero-2": ((1, 1, 2), DENSE, {**INT4, D + "zero": 2, D + "reduce": "microbatch"}),
    "hybrid": ((1, 1, 4), DENSE, {**NF4, **ZERO_3, D + "shard": 2}),
    "offload": ((1, 1, 2), DENSE, {**NF4, D + "zero": 1, D + "offload": "optimizer"}),
    "uneven-heads": ((2, 1, 1), UNEVEN, NF4),
    "few-adapters": ((2, 1, 1), DENSE, {**INT4, "finetune.lora.targets": ["attention.[qo]"]}),
    "1f1b": ((1, 2, 1), BIASED, {**NF4, "model.tied": True}),
    "zero-bubble": ((2, 2, 1), DENSE, {**NF4, S + "pipeline.schedule": "zb-h1"}),
    "ring": ((1, 1, 2), DENSE, {**INT4, S + "context.size": 2, "training.global_batch": 8}),
    "tensor-pipeline-zero-3": ((2, 2, 1), DENSE, {**NF4, **SEQUENCE, **ZERO_3}),
    "expert": ((1, 1, 2), MOE, {**NF4, **ZERO_3, S + "expert.size": 2}),
    "expert-tensor": ((2, 1, 1), MOE, {**INT4, **SEQUENCE}),
    "latent": ((2, 1, 1), MLA, NF4),
}


def made_of(mesh: Mesh) -> Any:
    return plan(*mesh[0], shape=mesh[1], microbatches=2, changes=mesh[2])


@pytest.mark.parametrize("name", FAST)
def test_equals_one_device_with_the_dequantized_weights(name: str) -> None:
    assert_equal_to_one_device(verify(made_of(FAST[name])))


@pytest.mark.slow
@pytest.mark.drawn(4)
@pytest.mark.parametrize("name", MORE)
def test_equals_one_device_under_more_axes(name: str) -> None:
    assert_equal_to_one_device(verify(made_of(MORE[name])))


def test_a_rank_that_quantizes_its_own_columns_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row's factor would then be of a row-parallel shard."""

    def own_columns(pieces: Any, form: FourBitFormat, num_columns: int) -> tuple[int, int]:
        bounds = [piece.at for piece in pieces if piece.part == 0]
        return 2 * min(start for start, _ in bounds), 2 * max(stop for _, stop in bounds)

    monkeypatch.setattr(fill_four_bit, "_columns", own_columns)
    failure_of(verify(plan(2, shape=DENSE, microbatches=2, changes=NF4)))


def test_bytes_that_are_not_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ParamAndGradStore, "gather_frozen", lambda self: None)
    failure_of(verify(plan(1, 1, 2, shape=DENSE, microbatches=2, changes={**NF4, D + "zero": 1})))


def loaded_bytes(made: ResolvedPlan, folder: Path, rank: int) -> list[tuple[str, Any, Any]]:
    session, seen = session_of(made, rank), list[tuple[int, int]]()
    SessionCheckpointer(session, folder).load(lambda *bytes_read: seen.append(bytes_read))
    assert seen == sorted(seen) and seen[-1][0] == seen[-1][1] > 0
    store, part = session.part.store, session.part
    return [
        (layout.name, slices, view.tolist())
        for name, layout in store.frozen_layouts.items()
        if name in part.stored_parts
        for view, slices in layout.parts(store.frozen_values[name])
    ]


@pytest.mark.parametrize("changes", [NF4, INT4], ids=["nf4", "int4"])
def test_a_base_is_quantized_as_it_is_loaded(changes: dict[str, Any], tmp_path: Path) -> None:
    base = session_of(plan(shape=BIASED).resolve(), 0)
    saver = SessionCheckpointer(base, tmp_path)
    path = saver.save(0)
    saver.wait()
    saver.close()
    own = {**changes, **ZERO_3, "finetune.base": str(path)}
    made = plan(2, 1, 2, shape=BIASED, changes=own).resolve()
    quantize = made.finetune and made.finetune.quantize
    assert quantize is not None
    form = FourBitFormat(quantize.format, quantize.group, quantize.double)
    found: dict[str, Tensor] = {}
    for boxes in run_ranks(4, partial(loaded_bytes, made, tmp_path / "run"), 60.0):
        for name, slices, values in boxes:
            weight = base.part.store.values[name.rpartition(".")[0]]
            true = getattr(quantize_four_bit(weight, form), name.rpartition(".")[2])
            box = tuple(slice(*bounds) for bounds in slices)
            assert true[box].tolist() == values, name
            found.setdefault(name, torch.zeros(true.shape))[box] = 1
    parts = 3 if form.double else 2
    assert len(found) == parts * len(block_linears(made.shape, 0)) * made.shape.layers
    assert all(bool(seen.all()) for seen in found.values())


def test_zero_3_gathers_bytes() -> None:
    changes = {**NF4, **ZERO_3, S + "precision": "bf16"}
    made = plan(1, 1, 2, shape=DENSE, changes=changes)
    found = rehearse(made).collectives
    gathered = found[(found.kind == "all_gather") & (found.axis == "data")]
    form = FourBitFormat("nf4", 32, True)
    sizes = [
        aligned_numel(linear.outputs * size)
        for linear in block_linears(made.resolve().shape, 0).values()
        for size in (
            form.number_bytes(linear.inputs),
            form.scale_bytes(linear.inputs),
            form.row_factor_bytes,
        )
    ]
    assert set(gathered[gathered.dtype == "uint8"].bytes) == {sum(sizes)}
    # Norms and adapters of a block are gathered in 16 bits, and embedding and head.
    shape = made.resolve().shape
    table = 2 * shape.vocab * shape.hidden
    others = gathered[(gathered.dtype != "uint8") & (gathered.bytes < table)]
    assert 0 < others.bytes.max() < sum(sizes)
