"""Whole models with replaced seams: the same numbers, less memory, and refusals where nothing can
compile.
"""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.parallel.small import GPT, LLAMA
from workbench.costmodel.compute import kernel_benchmarks
from workbench.costmodel.compute.kernel_launches import FUSED_KERNELS_PER_LAYER
from workbench.errors import PlanError
from workbench.kernels import fused_seams
from workbench.kernels.fused_seams import replace_seams, warm_up
from workbench.models import Transformer
from workbench.models.counter_dropout import Dropout
from workbench.models.seams import IGNORE_INDEX, Activate, AddNorm, HeadLoss, Rope
from workbench.plan.model.model_shape import Shape
from workbench.plan.rules.supported import unsupported
from workbench.plan.schema import Plan
from workbench.rehearsal.rehearse import rehearse
from workbench.runs.launch import preflight, subprocess_verbs

MODELS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "gpt": GPT,
    "geglu": {**LLAMA, "mlp": "geglu", "tied": True},
    "moe": {**LLAMA, "moe": {"experts": 4, "top_k": 2, "ffn": 32}},
}


def gradients(shape: Shape, kernels: str, dropout: float) -> dict[str, Tensor]:
    """Loss, and every gradient, of one model on one batch in fp64."""
    torch.manual_seed(0)
    model = Transformer(shape, dropout).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    replace_seams(model, kernels)
    tokens = torch.randint(0, shape.vocab, (2, 9))
    targets = tokens.roll(-1, 1).masked_fill(torch.rand(2, 9) < 0.2, IGNORE_INDEX)
    loss = model(tokens, targets)
    loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert len(found) == len(list(model.parameters()))
    return {"loss": loss.detach(), **found}


def assert_alike(found: dict[str, Tensor], true: dict[str, Tensor]) -> None:
    """Within 1e-10 of each tensor's largest entry, or of a millionth of the largest of all: a key
    bias has none.
    """
    least = 1e-6 * max(value.abs().max() for value in true.values())
    assert found.keys() == true.keys()
    for key, value in true.items():
        assert (found[key] - value).abs().max() <= 1e-10 * max(value.abs().max(), least), key


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kernels", ["compiled", "fused"])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_a_model_computes_the_same(name: str, kernels: str, dropout: float) -> None:
    shape = Plan.of("tiny", gpu="local", gpus=1, set={"model": MODELS[name]}).resolve().shape
    plain, other = gradients(shape, "eager", dropout), gradients(shape, kernels, dropout)
    assert_alike(other, plain)


def test_every_seam_that_can_be_is_replaced() -> None:
    shape = Plan.of("tiny", gpu="local", gpus=1).resolve().shape
    model = Transformer(shape, 0.1)
    names = set(model.state_dict())
    replace_seams(model, "fused")
    kinds = {type(module) for module in model.modules()}
    assert (
        set(fused_seams.FUSED_SEAMS.values()) <= kinds and not set(fused_seams.FUSED_SEAMS) & kinds
    )
    assert set(model.state_dict()) == names


@pytest.mark.slow
def test_a_warm_up_leaves_nothing_to_compile(caplog: pytest.LogCaptureFixture) -> None:
    shape = (
        Plan.of("tiny", gpu="local", gpus=1, set={"model": {**LLAMA, "mlp": "geglu"}})
        .resolve()
        .shape
    )
    model = Transformer(shape)
    replace_seams(model, "fused")
    assert list(warm_up([model], torch.float32)) == ["AddNorm", "Rope", "Activate", "HeadLoss"]
    caplog.set_level("INFO", logger="workbench.kernels")
    tokens = torch.randint(0, shape.vocab, (2, 16))
    model(tokens, tokens).backward()
    assert not [r.getMessage() for r in caplog.records if r.name.startswith("workbench")]


class Counting(TorchDispatchMode):
    """Counts operators that make something, views not."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not (func.is_view or func.name() == "aten::_unsafe_view")
        return func(*args, **(kwargs or {}))


def operators(layers: int) -> tuple[int, int]:
    shape = (
        Plan.of("tiny", gpu="local", gpus=1, set={"model": {**LLAMA, "layers": layers}})
        .resolve()
        .shape
    )
    model, tokens = Transformer(shape), torch.zeros(2, 8, dtype=torch.long)
    replace_seams(model, "fused")
    with Counting() as forward:
        loss = model(tokens, tokens)
    with Counting() as backward:
        loss.backward()
    return forward.count, backward.count


def test_the_planner_knows_how_many_operators_a_layer_has() -> None:
    fewer, more = operators(2), operators(3)
    assert (more[0] - fewer[0], more[1] - fewer[1]) == FUSED_KERNELS_PER_LAYER


@pytest.mark.parametrize("kernels", ["compiled", "fused"])
@pytest.mark.parametrize("gpu", ["local", "h100-sxm-80gb"])
def test_memory_falls(kernels: str, gpu: str) -> None:
    sizes = {
        "layers": 2,
        "hidden": 256,
        "heads": 4,
        "kv_heads": 2,
        "ffn": 768,
        "vocab": 4000,
        "mlp": "swiglu",
        "norm": "rmsnorm",
        "positions": "rope",
    }
    training = {
        "training.sequence_length": 512,
        "training.micro_batch": 2,
        "training.global_batch": 2,
    }
    plan = Plan.of(
        "tiny", gpu=gpu, gpus=1, set={"model": sizes, "strategy.precision": "bf16", **training}
    )
    eager, other = (
        rehearse(plan.replace(**{"strategy.kernels": kind})) for kind in ("eager", kernels)
    )
    assert max(other.peak_bytes_by_rank.values()) < 0.9 * max(eager.peak_bytes_by_rank.values())


def test_kernels_of_code_are_refused_by_name() -> None:
    written = {
        "model": {"python": "tests.parallel.users_model:build", "vocab": 260},
        "strategy": {"kernels": "fused"},
    }
    plan = Plan.model_validate({**written, "cluster": {"gpu": "local", "gpus": 1}}).resolve()
    found = [p for p in unsupported(plan, "run", allow_code=True) if p.field == "strategy.kernels"]
    assert len(found) == 1 and "fused" in str(found[0]) and "eager" in str(found[0])


@pytest.mark.parametrize("named", [None, "nowhere/g++"])
def test_without_a_compiler_nothing_is_started(
    monkeypatch: pytest.MonkeyPatch, named: str | None
) -> None:
    plan = Plan.of("tiny", gpu="local", gpus=1, set={"strategy.kernels": "fused"})
    monkeypatch.delenv("CXX", raising=False)
    assert not [p for p in preflight.preflight(plan) if p.field == "strategy.kernels"]
    if named:
        monkeypatch.setenv("CXX", named)
    else:
        monkeypatch.setattr(
            "workbench.runs.launch.kernel_compilers.shutil.which", lambda name: None
        )
    (problem,) = [p for p in preflight.preflight(plan) if p.field == "strategy.kernels"]
    assert (named or "g++") in str(problem) and "eager" in str(problem)
    with pytest.raises(PlanError, match="C\\+\\+ compiler"):
        subprocess_verbs.verify(plan)
    eager = plan.replace(**{"strategy.kernels": "eager"})
    assert not [p for p in preflight.preflight(eager) if p.field == "strategy.kernels"]


def measured_on_processors() -> dict[tuple[str, str, tuple[int, ...], str], tuple[float, float]]:
    """Of the committed benchmark: (operator, case, shape, dtype) -> seconds of forward and
    backward, (eager, fused).
    """
    (table,) = (b for b in kernel_benchmarks.kernel_benchmarks() if b["kind"] == "cpu")
    found: dict[tuple[str, str, tuple[int, ...], str], tuple[float, float]] = {}
    for row in table["kernels"]:
        key, seconds = (
            (row["kernel"], row["case"], tuple(row["shape"]), row["dtype"]),
            row["seconds"],
        )
        eager, fused = found.get(key, (0.0, 0.0))
        found[key] = eager + seconds["eager"], fused + seconds["fused"]
    return found


def chosen(kernel: str, case: str, entries: int) -> bool:
    """Whether `kernels: fused` runs our operator on processors for a seam of so many entries."""
    kind = case.removeprefix("bias and ")
    seam: torch.nn.Module = {
        "add_norm": lambda: AddNorm(kind, 8, 1e-5, False),
        "rope": Rope,
        "activation": lambda: Activate(kind),
        "dropout": lambda: Dropout(0.1, 0),
        "cross_entropy": lambda: HeadLoss(8, 16),
    }[kernel]()
    replace_seams(seam, "fused", "cpu")
    return type(seam) in fused_seams.FUSED_SEAMS.values() and entries >= int(
        getattr(seam, "plain_below", 0)
    )


def test_nothing_is_chosen_on_processors_that_loses_to_eager_by_the_committed_benchmark() -> None:
    """The loss of whole logits is that of a split vocabulary; few tokens times a weight are no seam
    of training.
    """
    rows = {key: seconds for key, seconds in measured_on_processors().items() if key[0] != "matvec"}
    choice = {key: chosen(key[0], key[1], math.prod(key[2])) for key in rows}
    assert not {
        key: seconds for key, seconds in rows.items() if choice[key] and seconds[1] > seconds[0]
    }
    assert {key[0] for key in rows if choice[key]} == {
        "add_norm",
        "rope",
        "activation",
        "cross_entropy",
    }
    assert any(seconds[1] > seconds[0] for seconds in rows.values())


def test_unknown_kernels_are_refused() -> None:
    with pytest.raises(
        ValueError, match="kernels are 'fuse'; legal: 'eager', 'compiled' or 'fused'"
    ):
        replace_seams(torch.nn.Identity(), "fuse")
