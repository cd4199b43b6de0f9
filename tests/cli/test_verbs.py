"""`import workbench as wb`: every name is there, none of them costs before it is used."""

import json
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import workbench as wb
from workbench.cli.app import COMMANDS
from workbench.errors import PlanError

CONFIG = json.dumps(
    {
        **{"model_type": "llama", "hidden_size": 64, "intermediate_size": 64, "vocab_size": 64},
        **{"num_hidden_layers": 2, "num_attention_heads": 4, "tie_word_embeddings": False},
    }
)
PROGRAM = """
import sys, workbench as wb
plan = wb.Plan.of("llama-3-8b", gpu="h100-sxm-80gb", gpus=64, strategy="zero-3")
assert wb.estimate(plan).fits
loaded = {"torch", "altair", "ipywidgets", "typer"} & set(sys.modules)
sys.exit(f"loaded {loaded}" if loaded else 0)
"""


@pytest.mark.parametrize("name", wb.__all__)
def test_names(name: str) -> None:
    assert getattr(wb, name) is not None and name in dir(wb)


def test_what_completes_is_the_api_alone_and_has_the_names_of_the_shell() -> None:
    assert set(dir(wb)) == set(wb.__all__)
    in_python = {"plan": "Plan", "import": "import_config", "attach": "attach"}
    beside = {"kernels", "doctor", "lab", "stop"}  # of a shell alone; a run has its own `stop`
    for command in (name for family in COMMANDS.values() for name in family if name not in beside):
        assert in_python.get(command, command.replace("-", "_")) in dir(wb)


def test_verbs_stay_callable_beside_packages_of_their_names(tmp_path: Path) -> None:
    for name in ("runs", "models"):
        package = import_module(f"workbench.{name}")
        assert getattr(wb, name) is package and package.__path__
    assert wb.runs(tmp_path) == [] and {row["name"] for row in wb.models()} >= {"tiny"}


@pytest.mark.parametrize("verb", [wb.gpus, wb.models, wb.strategies])
def test_the_catalog_shows_itself(verb: Callable[[], Any]) -> None:
    found = verb()
    first = found[0]["name"]
    assert first in repr(found) and f"<td>{first}</td>" in found._repr_html_()


def test_planning_and_estimating_load_neither_torch_nor_widgets() -> None:
    assert subprocess.run([sys.executable, "-c", PROGRAM], check=False).returncode == 0


def test_an_unknown_name_says_what_there_is() -> None:
    with pytest.raises(AttributeError, match="it has Plan"):
        wb.simulate  # noqa: B018


def test_a_base_that_is_not_here_is_said_and_another_models_is_refused(tmp_path: Path) -> None:
    plan = wb.Plan.of("tiny", set={"finetune.base": str(tmp_path)})
    for verb in (wb.estimate, wb.explain, wb.rehearse, wb.verify):
        with pytest.raises(PlanError, match=r"^finetune\.base: '\S+' is no checkpoint; legal: "):
            verb(plan)
    (tmp_path / "config.json").write_text(CONFIG)
    unfit = plan.replace(**{"strategy.pipeline.size": 64})  # a search looks for another strategy
    of_another: list[tuple[Callable[[wb.Plan], Any], wb.Plan]]
    of_another = [(wb.estimate, plan), (wb.search, unfit), (wb.search_methods, unfit)]
    for finds, asked in of_another:
        with pytest.raises(PlanError, match=r"model\.hidden: is 128; in \S+json it is 64; give"):
            finds(asked)
    elsewhere = plan.replace(**{"finetune.base": "none.gguf"})
    found = wb.estimate(elsewhere)
    assert found.fits and found.notes["base"].startswith("finetune.base 'none.gguf' is not on this")


def test_plans_and_plan_files_are_the_same_to_a_verb(tmp_path: Path) -> None:
    plan = wb.Plan.of("tiny", gpu="h100-sxm-80gb", gpus=4, strategy="dapple")
    (tmp_path / "plan.yaml").write_text(plan.to_yaml())
    assert (
        wb.estimate(tmp_path / "plan.yaml").peak_bytes_by_rank
        == wb.estimate(plan).peak_bytes_by_rank
    )
    assert "preset: dapple" in plan._repr_html_() and "'preset': 'dapple'" in repr(plan)


def test_what_cannot_be_done_is_refused_by_name() -> None:
    plan = wb.Plan.of(
        "tiny", gpu="h100-sxm-80gb", gpus=4, strategy="ddp", set={"strategy.stack": "deepspeed-3d"}
    )
    for verb in (wb.rehearse, wb.verify, wb.run):
        with pytest.raises(
            PlanError, match=r"strategy\.stack: is 'deepspeed-3d'; this version can"
        ):
            verb(plan)


def test_compare_leaves_out_what_cannot_be_rehearsed() -> None:
    plan = wb.Plan.of(
        "tiny", gpu="h100-sxm-80gb", gpus=4, strategy="ddp", set={"strategy.stack": "deepspeed-3d"}
    )
    found = wb.compare(plan)
    assert set(found.summary.source) == {"estimated"}


def test_a_report_takes_what_compare_takes(tmp_path: Path) -> None:
    file = tmp_path / "plan.yaml"
    file.write_text(wb.Plan.of("tiny", gpus=2, strategy="ddp").to_yaml())
    page = wb.report(
        [file, wb.Plan.of("tiny", gpus=2, strategy="zero-1")], tmp_path / "report.html"
    )
    text = page.read_text()
    assert "ddp" in text and "zero-1" in text


def test_a_profile_shows_itself() -> None:
    found = wb.estimate(wb.Plan.of("tiny", gpu="h100-sxm-80gb", gpus=4, strategy="dapple"))
    assert "estimated" in repr(found) and "fits yes" in repr(found)
    assert (
        "<td>parameters, peak</td>" in found._repr_html_()
        and "<td>ranks</td><td>4</td>" in found._repr_html_()
    )
