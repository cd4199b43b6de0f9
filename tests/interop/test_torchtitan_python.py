"""torchtitan's configurations in Python: read by their syntax, never run; what is not literal is
named.
"""

import ast
import random
from pathlib import Path
from typing import Any

import pytest

from tests.fuzz import examples
from workbench import interop
from workbench.errors import PlanError
from workbench.interop.torchtitan import python_configs
from workbench.interop.translation import Imported

H100 = "h100-sxm-80gb"
HEAD = """
from torchtitan.components.optimizer import default_adamw, LRSchedulersContainer
from torchtitan.config import ParallelismConfig, TrainingConfig, CompileConfig
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.models.llama3 import model_registry
from torchtitan.trainer import Trainer

WIDTH = 2

def base() -> Trainer.Config:
    spec = model_registry("8B")
    return Trainer.Config(
        model_spec=spec,
        optimizer=default_adamw(lr=3e-4, betas=(0.9, 0.99)),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=7, decay_type="cosine"),
        training=TrainingConfig(local_batch_size=4, seq_len=4 * 1024, steps=100),
        parallelism=ParallelismConfig(tensor_parallel_degree=WIDTH),
        activation_checkpoint=SelectiveAC.Config(),
    )
"""
OTHER = """
def other() -> Trainer.Config:
    config = base()
"""


def read(text: str, config: str | None = "other", **given: Any) -> Imported:
    return interop.read(HEAD + text, gpu=H100, gpus=8, config=config, **given)


def problems(text: str, config: str | None = "other", **given: Any) -> dict[str, str]:
    with pytest.raises(PlanError) as caught:
        read(text, config, **given)
    return {problem.field: problem.message for problem in caught.value.problems}


def test_literals_names_and_functions_of_the_file_are_read() -> None:
    body = "    config.training.steps = 30\n    config.compile = CompileConfig(enable=True)\n"
    found = read(OTHER + body + "    return config\n")
    plan = found.plan.resolve()
    assert (plan.shape.name, plan.training.steps, plan.strategy.kernels) == (
        "llama-3-8b",
        30,
        "compiled",
    )
    assert (plan.training.sequence_length, plan.training.micro_batch) == (4096, 4)
    assert plan.sizes["tensor"] == 2 and plan.sizes["data"] == 4
    adam = plan.training.optimizer
    assert (adam.learning_rate, adam.beta1, adam.beta2) == (3e-4, 0.9, 0.99)
    assert (adam.warmup_steps, adam.decay) == (
        7,
        "cosine",
    ) and plan.strategy.recompute == "selective"
    first = read("", None).plan.resolve()
    assert first.training.steps == 100 and first.strategy.kernels == "eager"


def test_functions_take_their_arguments() -> None:
    text = """
def sized(steps: int, width=WIDTH, *, recompute=None) -> Trainer.Config:
    config = base()
    config.training.steps = steps
    config.parallelism.tensor_parallel_degree = width
    config.activation_checkpoint = recompute
    return config

def other() -> Trainer.Config:
    return sized(9, width=4, recompute=FullAC.Config())
"""
    plan = read(text).plan.resolve()
    assert (plan.training.steps, plan.sizes["tensor"], plan.strategy.recompute) == (9, 4, "full")


def test_of_several_configurations_one_is_asked_for() -> None:
    text = OTHER + "    return config\n"
    assert "base, other" in problems(text, None)["config"]
    assert "base, other" in problems(text, "nowhere")["config"]
    with pytest.raises(PlanError, match="is for Python with several"):
        interop.read("[parallelism]\n", "fsdp", config="other")


@pytest.mark.parametrize(
    "line",
    [
        "config.training.steps = len(os.listdir('/'))",
        "config.training.steps = 2 ** 9999999",
        "config.training.steps = [n for n in range(3)][0]",
        "config.training.steps = int('3')",
        "config.training.steps += 4",
        "if WIDTH > 1:\n        config.training.steps = 3",
        "for config.training.steps in range(9):\n        pass",
        "config.training.steps = (lambda: 3)()",
        "config.training.steps = config.training.seq_len",
    ],
)
def test_what_is_not_literal_is_asked_for_with_its_line(line: str) -> None:
    said = problems(f"{OTHER}    {line}\n    return config\n")["training.steps"]
    assert "(line " in said and "Python that is not run" in said
    assert said.count("\n") == 0


def test_what_no_plan_uses_may_be_open() -> None:
    found = read(OTHER + "    config.override.imports.append(WIDTH)\n    return config\n")
    notes = {note.field: note.value for note in found.untranslated}
    assert "append" in str(notes["override.imports"])


def test_converters_and_their_settings_are_read() -> None:
    text = """
def other() -> Trainer.Config:
    config = base()
    config.model_spec = model_registry(
        "8B", converters=[Float8LinearConverter.Config(recipe_name="rowwise", emulate=True)]
    )
    return config
"""
    found = read(text)
    assert found.plan.strategy.precision == "fp8"
    assert {"float8.recipe_name", "float8.emulate"} <= {n.field for n in found.untranslated}


def test_the_model_is_of_the_family_that_the_file_is_of(tmp_path: Path) -> None:
    near = HEAD.replace("from torchtitan.models.llama3 import", "from . import")
    given: dict[str, Any] = {"gpu": H100, "gpus": 8}
    with pytest.raises(PlanError, match=r"model\.name 'base', model\.flavor '8B' is no model"):
        interop.read(near, **given)
    for family, name in (("llama3", "llama-3-8b"), ("qwen3", "qwen3-8b")):
        path = tmp_path / family / "config_registry.py"
        path.parent.mkdir()
        path.write_text(near)
        assert interop.load(path, **given).plan.model == name
    assert interop.read(near.replace("base", "qwen3_8b_own"), **given).plan.model == "qwen3-8b"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def other() -> Trainer.Config:\n    return other()\n", "within each other"),
        ("def other() -> Trainer.Config:\n    return elsewhere.config()\n", "not known here"),
        ("def other() -> Trainer.Config:\n    return 3\n", "not known here"),
        (f"{OTHER}    if WIDTH:\n        return config\n    return base()\n", "returns within if"),
        (f"{OTHER}    config.training.stepz = 3\n    return config\n", "unknown key"),
        (f"{OTHER}    config.training = 3\n    return config\n", "must be a mapping"),
        (f"{OTHER}    config.optimizer = Muon.Config()\n    return config\n", "Muon"),
        ("x = " + "(" * 500 + "1" + ")" * 500 + "\n", "too many nested parentheses"),
        ("x = " + "-" * 100_000 + "1\n", "nested too deeply"),
        ("x = '\0'\n", "null byte"),
        ("def (:\n", "line 20"),
    ],
)
def test_hostile_python_is_refused_by_a_sentence(text: str, words: str) -> None:
    with pytest.raises(PlanError) as caught:
        interop.read(HEAD + text, "torchtitan", gpu=H100, gpus=8, config="other")
    assert words in str(caught.value) and len(str(caught.value)) < 900


LOOP = "def f0():\n    for i in x:\n" + "        y = i\n" * 500 + "    return 1\n"
CALLS = [f"def f{n}():\n    return [f{n + 1}(), f{n + 1}()]\n" for n in range(30)]


@pytest.mark.parametrize(
    ("functions", "lines"),
    [
        ("".join(CALLS) + "def f30():\n    return 1\n", ["a = f0()"]),
        (LOOP, ["a = f0()"] * 300),
        ("", ["a = {}", *["a = {'x': a, 'y': a}"] * 40]),
        ("", ["a = []", *["a = [a, a]"] * 40]),
        ("", ["a = X.Config()", *["a = X.Config(b=a, c=a)"] * 40]),
        ("def f0():\n    return " + "{*" + "x, *" * 5000 + "x}\n", ["a = f0()"] * 300),
    ],
)
def test_what_doubles_or_is_read_often_has_an_end(functions: str, lines: list[str]) -> None:
    body = "".join(f"    {line}\n" for line in [*lines, "config.training.steps = a"])
    said = problems(functions + OTHER + body + "    return config\n")
    assert f"more than {python_configs.MOST_NODES}" in said["file"]


def test_nothing_of_a_file_is_run(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    deed = f"open({str(mark)!r}, 'w').close()"
    text = f"{deed}\n{OTHER}    {deed}\n    config.training.steps = {deed}\n    return config\n"
    assert "training.steps" in problems(text)
    assert not mark.exists()


def test_any_damage_is_refused_or_read() -> None:
    """Nodes of a whole file exchanged, dropped and doubled at random: a plan, or a sentence."""
    whole = HEAD + OTHER + "    config.training.steps = 3\n    return config\n"
    for seed in range(examples(150)):
        rng = random.Random(seed)
        tree = ast.parse(whole)
        nodes = [node for node in ast.walk(tree) if isinstance(node, ast.expr)]
        for _ in range(rng.randint(1, 3)):
            first, second = rng.choice(nodes), rng.choice(nodes)
            fields = [f for f, v in ast.iter_fields(first) if isinstance(v, ast.expr)]
            if fields:
                setattr(first, rng.choice(fields), second)
        try:
            text = ast.unparse(tree)
        except (RecursionError, ValueError, TypeError, AttributeError):
            continue
        characters = list(text)
        if rng.random() < 0.3:
            characters[rng.randrange(len(characters))] = rng.choice("()[]{}:=,.'\"\\\n\t 0-*@")
        damaged = "".join(characters)
        try:
            interop.read(damaged, "torchtitan", gpu=H100, gpus=8, config="other")
        except PlanError as error:
            assert str(error) and len(str(error)) < 4000


@pytest.mark.parametrize(
    ("before", "steps"),
    [
        ("", "*".join("2" * 2000)),
        ("".join(f"K{k} = K{k + 1} + K{k + 1}\n" for k in range(60)), "K0"),
        (
            "def f(x):\n    for i in y:\n" + "        x = x + 1\n" * 2000 + "    return x\n",
            f"[{','.join(['f(1)'] * 9000)}]",
        ),
        (
            "def f(x):\n" + "    x += 1\n" * 2000 + "    return x\n",
            f"[{','.join(['f(1)'] * 9000)}]",
        ),
    ],
)
def test_code_that_would_take_long_is_refused(before: str, steps: str) -> None:
    body = f"    config = base()\n    config.training.steps = {steps}\n    return config\n"
    assert problems(f"{before}\ndef other() -> Trainer.Config:\n{body}")
