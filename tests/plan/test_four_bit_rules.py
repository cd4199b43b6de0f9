"""What a 4-bit base needs of a plan."""

from typing import Any

import pytest

from tests.parallel.small import LLAMA, plan
from workbench.errors import PlanError
from workbench.plan.model.four_bit_base import four_bit_notes
from workbench.plan.schema import Quantize
from workbench.runs.launch import kernel_compilers

SHAPE = {**LLAMA, "hidden": 128, "ffn": 192, "layers": 2}
QUANTIZE = {"finetune.quantize": {"format": "nf4", "group": 64}}


@pytest.mark.parametrize(
    ("tensor", "changes", "field", "says"),
    [
        (1, {"finetune.quantize.group": 128}, "group", r"mlp.down = 192\); legal: 32 or 64"),
        (2, {}, "group", r"over 2 tensor ranks \(mlp.down = 96\); legal: 32"),
        (4, {}, "group", r"attention.o = 32, mlp.down = 48\); legal: finetune.quantize: null"),
        (1, {"strategy.precision": "fp8"}, "", "legal: null, or precision: bf16, fp16 or fp32"),
        (1, {"finetune.method": "full"}, "", "trains every weight"),
    ],
)
def test_refused(tensor: int, changes: dict[str, Any], field: str, says: str) -> None:
    with pytest.raises(PlanError, match=says) as error:
        plan(tensor, shape=SHAPE, changes={**QUANTIZE, **changes}).resolve()
    fields = [problem.field for problem in error.value.problems]
    assert "finetune.quantize" + (f".{field}" if field else "") in fields


@pytest.mark.parametrize(
    "strategy", [{"operators": {"*": "replicate"}}, {"tensor": {"size": [2, 2], "algorithm": "2d"}}]
)
def test_refused_beside_operators_and_grids(strategy: dict[str, Any]) -> None:
    changes = {f"strategy.{name}": value for name, value in strategy.items()}
    with pytest.raises(PlanError, match=r"finetune\.quantize: is nf4, but"):
        plan(1, 1, 4, shape=SHAPE, changes={**QUANTIZE, **changes}).resolve()


def test_notes_say_what_is_not_quantized() -> None:
    full = plan(shape=SHAPE, changes={**QUANTIZE, "strategy.precision": "bf16"}).resolve()
    note = four_bit_notes(full)["four_bit_base"]
    linears = 2 * (2 * 128 * 128 + 2 * 64 * 128 + 3 * 128 * 192)
    assert note["parameters"] == linears
    # Rows of 128 columns: 64 bytes of numbers, 2 of scales, 4 of a factor; of 192: 96, 3 and 4.
    assert note["bytes"] == 2 * ((128 + 64 + 64 + 128 + 2 * 192) * 70 + 128 * 103)
    left = 2 * 257 * 128 + 5 * 128
    assert note["unquantized_parameters"] == left and note["unquantized_bytes"] == 2 * left
    assert note["unquantized_share"] == pytest.approx(left / (left + linears))
    assert four_bit_notes(plan(shape=SHAPE).resolve()) == {}


def test_a_missing_kernel_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_compilers, "find_spec", lambda name: None)
    (found,) = kernel_compilers.missing_four_bit_kernel(Quantize(), "fused", "cuda")
    assert found.field == "finetune.quantize"
    assert found.message.endswith("legal: null, or strategy.kernels: eager")
    for asked in (
        (None, "fused", "cuda"),
        (Quantize(), "eager", "cuda"),
        (Quantize(), "fused", "cpu"),
    ):
        assert kernel_compilers.missing_four_bit_kernel(*asked) == []
