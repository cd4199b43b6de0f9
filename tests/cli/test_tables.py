"""What a terminal shows of a run's end and of an instrument's notes."""

import ast
import functools
import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

import workbench
from tests.conftest import Ask
from workbench.cli import tables
from workbench.cli.commands import compare as cli_compare
from workbench.cli.commands import doctor, explain, kernels, operators, search, validate
from workbench.cli.commands.interop import notes
from workbench.cli.gpu_findings import Finding
from workbench.cli.progress import run_to_end
from workbench.cli.terminal import Grid, print_words
from workbench.errors import RunError
from workbench.interop import KeyNote
from workbench.lab.comparison.compare import Comparison
from workbench.lab.comparison.entries import ComparisonEntry
from workbench.lab.palette import key_label
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.schema import Plan, build_plan
from workbench.planner import estimate
from workbench.planner.autoshard import choose_for_plan
from workbench.profile import Profile
from workbench.runs.run import Run
from workbench.runs.store.run_state import Cause, first_state, write_state
from workbench.units import risk_text
from workbench.untrusted_text import visible
from workbench.verbs import catalog


@pytest.mark.parametrize(
    ("rank", "message", "says"),
    [
        (0, "rank 0 raised ValueError: no in step 2", "rank 0 raised ValueError: no in step 2"),
        (1, "out of memory beside rank 10 of 16", "rank 1: out of memory beside rank 10 of 16"),
        (0, "ranks 0, 1 of 16 never said hello", "ranks 0, 1 of 16 never said hello"),
        (None, "the launcher was killed by SIGKILL", "the launcher was killed by SIGKILL"),
    ],
)
def test_a_failure_names_its_rank_once(
    tmp_path: Path, rank: int | None, message: str, says: str
) -> None:
    cause = Cause(rank, message, "Mend it.", "last line")
    write_state(tmp_path, replace(first_state(16, 20), phase="failed", cause=cause))
    run = Run(tmp_path)
    assert tables.ending(run, run.state).splitlines()[1:] == [says, "Mend it.", "last line"]
    with pytest.raises(RunError) as error:
        run_to_end(run, "1 of 1")
    assert str(error.value) == f"run {run.id} failed: {says}. Mend it.\nlast line"


def notes_of(found: Profile) -> Any:
    return tables.notes_table(found)


def test_notes_have_labels_and_keep_their_keys() -> None:
    time = {"tensor_comm": 0.0163, "bubble": 7e-18}
    found = Profile("tiny", "estimated", 1, notes={"time": time, "model_flops_utilisation": 0.25})
    told = dict(zip(*(map(str, column.cells) for column in notes_of(found).columns)))
    assert told == {
        "time: exposed tensor communication": "16.3 ms",
        "time: bubble": "0 ms",
        "model FLOPs utilisation": "25.0%",
    }
    assert found.summary()["time"] == time and found.summary()["model_flops_utilisation"] == 0.25


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("data_comm", "exposed data communication"),
        ("communication", "communication"),
        ("compute", "compute"),
        ("timeline_microbatches", "timeline microbatches"),
    ],
)
def test_keys_in_words(key: str, says: str) -> None:
    assert key_label(key) == says


@pytest.mark.parametrize(
    "distribution, says",
    [("split", "share each microbatch"), ("round_robin", "take whole microbatches in turn")],
)
def test_stages_of_unequal_replicas_are_shown_with_what_they_keep(
    distribution: str, says: str
) -> None:
    pipeline = {"size": 2, "replicas": [2, 1], "in_flight": [1, 1], "distribution": distribution}
    cluster = {"gpu": "h100-sxm-80gb", "gpus": 3}
    plan = build_plan({"model": "tiny", "cluster": cluster, "strategy": {"pipeline": pipeline}})
    fields, values = tables.plan_table(plan.resolve()).columns
    shown = dict(zip(map(str, fields.cells), map(str, values.cells)))
    assert shown["axes"] == "tensor 1 x context 1 x replicas 2 + 1 = 3"
    assert f"replicas of each [2, 1], that {says} ({distribution})" in shown["pipeline"]
    assert shown["pipeline"].endswith("at most [1, 1] microbatches in flight on each")


def test_a_plan_shows_what_fine_tuning_trains() -> None:
    changes: dict[str, Any] = {"finetune.lora.targets": ["attention.q", "mlp.*"]}
    changes |= {"finetune.base": "b.gguf", "finetune.quantize": {"group": 32}}
    changes |= {"finetune.preference": {}, "corpus.format": "preferences"}
    plan = Plan.of("tiny", gpu="h100-sxm-80gb", set=changes)
    fields, values = tables.plan_table(plan.resolve()).columns
    shown = dict(zip(map(str, fields.cells), map(str, values.cells)))
    assert (
        shown["finetune"] == "100 steps of adamw, learning rate 0.0003" and "training" not in shown
    )
    adapters = "LoRA of rank 8 on attention.q, mlp.*"
    pairs = "preference pairs (DPO, beta 0.1)"
    assert shown["trained"] == f"{adapters}, base b.gguf in nf4, groups of 32, {pairs}"


def test_categories_and_axes_are_shown_by_their_names() -> None:
    found = estimated()
    rows = [str(cell) for cell in tables.profile_table(found).columns[0].cells]
    assert "  CUDA context + NCCL, peak" in rows and "  workspace, peak" in rows
    stages, calls = tables.stages_table(found), tables.collectives_table(found)
    assert stages is not None and calls is not None
    shown_names = {str(column.header) for column in stages.columns}
    assert {"workspace", "CUDA context + NCCL"} <= shown_names
    assert not {"temporary", "outside_allocator"} & {*shown_names, *rows}
    assert {"temporary", "outside_allocator"} <= set(found.summary()["memory"]["by_category"])


@pytest.mark.parametrize(
    ("probability", "text"),
    [(0.0, "< 0.1 %"), (0.0009, "< 0.1 %"), (0.012, "1.2 %"), (0.43, "43 %"), (1.0, "> 99.9 %")],
)
def test_a_risk_is_never_shown_as_none(probability: float, text: str) -> None:
    assert risk_text(probability) == text


def test_an_interval_is_shown_by_its_ends() -> None:
    need = {"p50": 2.0**31, "p95": 3.0 * 2**30, "probability_of_running_out": 0.0123}
    found = Profile("tiny", "estimated", 1, notes={"step_seconds_90": [0.1, 0.25], "memory": need})
    told = dict(zip(*(map(str, column.cells) for column in notes_of(found).columns)))
    assert told == {
        "step time, 90 % interval": "100 ms to 250 ms",
        "memory: median": "2.00 GiB",
        "memory: 95th percentile": "3.00 GiB",
        "memory: out-of-memory risk": "1.2 %",
    }
    assert found.summary()["memory"] == {"peak_bytes_by_rank": {}, "by_category": {}, **need}


def test_fits_is_said_with_its_risk() -> None:
    found = estimate(Plan.of("llama-3-8b", gpu="h100-sxm-80gb", gpus=8, strategy="zero-3"))
    assert found.facts()["fits"] == "yes, out-of-memory risk < 0.1 %"
    shown_rows = list(zip(*(map(str, one.cells) for one in tables.profile_table(found).columns)))
    assert ("fits", "yes", "out-of-memory risk < 0.1 %") in shown_rows
    assert Profile("tiny", "measured", 1).risk_words == ""


GLOO = (
    "RuntimeError: [/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:78] "
    "Connection reset"
)
ESCAPES = "\x1b[31m\x1b]0;title\x07\x9b2J\u202e\u2066red\u2069\r\x00"
HOSTILE = f"[/x] [bold]{ESCAPES} {GLOO} \\"


def shown(table: Grid, width: int = 400) -> str:
    stream = io.StringIO()
    Console(file=stream, width=width, highlight=False).print(table)
    return stream.getvalue()


def hostile_plan() -> ResolvedPlan:
    return Plan.of("tiny-gpt", gpus=1, set={"name": HOSTILE}).resolve()


def hostile_profile() -> Profile:
    return Profile(HOSTILE, "estimated", 1, notes={"kernels": HOSTILE, HOSTILE: HOSTILE})


def hostile_run(folder: Path) -> Run:
    cause = Cause(0, HOSTILE, HOSTILE, HOSTILE)
    write_state(folder, replace(first_state(2, 20), phase="failed", cause=cause))
    return Run(folder)


ROW = {
    "name": HOSTILE,
    "title": HOSTILE,
    "source": HOSTILE,
    "fabric": HOSTILE,
    "positions": HOSTILE,
    "tflops": {},
}
SIZES = dict.fromkeys(
    ("parameters", "layers", "hidden", "heads", "kv_heads", "vocab", "memory_gib"), 1
)
RATES = {"tflops": {"bf16": 1.0}, "bandwidth_gbs": 1, "link_gbs": 1, "watts": 1}
KERNEL = {"gpu": HOSTILE, "cpu": HOSTILE, "reference": HOSTILE, "measured": [], "ahead": []}
DIFFERENCES = dict.fromkeys(("loss", "gradients", "weights"), 0.0)
VERIFICATION: dict[str, Any] = {
    "passed": True,
    "precision": "fp64",
    "tolerance": 0.0,
    "max_abs_diff": DIFFERENCES,
    "max_relative_diff": DIFFERENCES,
    "worst": {"kind": HOSTILE, "tensor": HOSTILE, "rank": 0, "absolute": 0.0, "relative": 0.0},
}


TABLES = [
    lambda _: tables.table(HOSTILE, [HOSTILE]),
    lambda _: tables.plan_table(hostile_plan()),
    lambda _: tables.profile_table(hostile_profile()),
    lambda _: tables.notes_table(hostile_profile()),
    lambda folder: tables.runs_table([hostile_run(folder)]),
    lambda _: tables.verification_table(VERIFICATION),
    lambda _: tables.differences_table([(HOSTILE, HOSTILE, HOSTILE)], HOSTILE),
    lambda _: doctor._table([Finding(HOSTILE, False, HOSTILE, HOSTILE)]),
    lambda _: tables.listing_table(catalog.models_listing([ROW | SIZES])),
    lambda _: tables.listing_table(catalog.gpus_listing([ROW | SIZES | RATES])),
    lambda _: tables.listing_table(catalog.strategies_listing([ROW | {"runnable": False}])),
    lambda _: kernels.overview([ROW | KERNEL]),
    lambda _: notes(HOSTILE, HOSTILE, [KeyNote(HOSTILE, HOSTILE, HOSTILE)]),
    lambda _: validate._reasons({"reasons": {HOSTILE: 1}, "refused_by_planner": {HOSTILE: 1}}),
]


@pytest.mark.parametrize("build", TABLES, ids=range(len(TABLES)))
def test_every_table_shows_text_as_it_is_without_what_a_terminal_acts_on(
    tmp_path: Path, build: Callable[..., Any]
) -> None:
    text = shown(build(tmp_path))
    assert "[/x] [bold][31m]0;title2Jred " in text and not set(text) & set(
        "\x1b\x07\x9b\u202e\u2066\u2069\r\x00"
    )


SIXTEEN = {
    "parameters": 1.34e10,
    "layers": 126,
    "hidden": 16384,
    "heads": 128,
    "kv_heads": 128,
    "vocab": 250880,
}
COMMON = {
    "name": "deepseek-v2-lite",
    "title": "ZeRO stage 2: optimizer states and gradients sharded",
    "source": "Rajbhandari et al. 2020, ZeRO (arXiv 1910.02054)",
    "fabric": "frontier-mi250x",
    "positions": "learned",
    "memory_gib": 284.6,
    "tflops": {"bf16": 2250.0},
    "bandwidth_gbs": 8000,
    "link_gbs": 1800,
    "watts": 1400,
    "runnable": True,
}
MEASURED = {
    "device": "NVIDIA H100 80GB HBM3",
    "date": "2026-11-22",
    "kind": "cuda",
    "case": "rmsnorm",
    "dtype": "bfloat16",
    "shape": [8192, 4096],
    "over": dict.fromkeys(kernels.PEERS, 1.61),
    "share_of_copy": 0.91,
}
FUSED = {
    "name": "linear_cross_entropy",
    "title": "projection + cross entropy",
    "gpu": "chunked: ATen, Triton",
    "cpu": "chunked: ATen, torch.compile",
    "reference": "linear_cross_entropy.reference",
    "measured": [MEASURED],
    "ahead": [
        {
            "sm": 100,
            "registers": 140,
            "spills": 1024,
            "shared": 16384,
            "vectorised": True,
            "cases": 12,
        }
    ],
}
LONG_VERIFICATION = {
    **VERIFICATION,
    "worst": {
        **VERIFICATION["worst"],
        "kind": "weights",
        "tensor": "layers.3.attention.query.weight",
    },
}
ERRORS = {
    "rows": 1234,
    "mape": 0.1234,
    "median_ape": 0.1,
    "bias": -0.05,
    "within_10": 0.5,
    "worst": {"row": "a-table.csv:31", "error": 1.5},
}
WHY = "the format has no place for a partition by layers"


def large_plan() -> Plan:
    return Plan.of("llama-3-70b", gpu="h100-sxm-80gb", gpus=128, strategy="megatron-3d")


@functools.cache
def estimated() -> Profile:
    return workbench.estimate(large_plan())


def listed_run(folder: Path) -> Run:
    run = folder / "20261121-181512-llama-3-8b-zero-3"
    run.mkdir()
    write_state(
        run,
        replace(
            first_state(64, 20000), phase="failed", cause=Cause(3, "rank 3 raised ValueError: no")
        ),
    )
    return Run(run)


def side_by_side(number: int) -> Grid:
    """One of the tables of a comparison of two long names, with a run beside them."""
    measured = replace(estimated(), run="20261121-181512-llama-3-70b-zero-3", source="measured")
    entry = ComparisonEntry(
        "llama-3-70b", [estimated(), measured], large_plan(), "failed after step 12,345"
    )
    other = ComparisonEntry(
        large_plan().resolve().name,
        [estimated()],
        large_plan().replace(**{"training.micro_batch": 2}),
    )
    return cli_compare.comparison_grid(*Comparison([entry, other]).tables[number])


ORDINARY = [
    lambda _: tables.plan_table(large_plan().resolve()),
    lambda _: tables.profile_table(estimated()),
    lambda _: tables.notes_table(estimated()),
    lambda _: tables.stages_table(estimated()),
    lambda _: tables.collectives_table(estimated()),
    lambda folder: tables.runs_table([listed_run(folder)]),
    lambda _: tables.verification_table(LONG_VERIFICATION),
    lambda _: tables.listing_table(catalog.models_listing([COMMON | SIXTEEN])),
    lambda _: tables.listing_table(catalog.gpus_listing([COMMON])),
    lambda _: tables.differences_table(
        [("strategy.pipeline.partition", [32], [20, 20, 21, 19])], "other.yaml"
    ),
    lambda _: doctor._table(
        [Finding("CUDA", None, "torch 2.13.0+cpu sees no GPU", "Install a build for CUDA.")]
    ),
    lambda _: tables.listing_table(catalog.strategies_listing([COMMON])),
    lambda _: kernels.overview([FUSED]),
    lambda _: kernels.compiled([FUSED], "3.6.0"),
    lambda _: kernels.speeds([FUSED]),
    lambda _: notes(
        "Not translated", "field", [KeyNote("strategy.pipeline.partition", [20, 20, 21, 19], WHY)]
    ),
    lambda _: validate._parts(
        "framework profile",
        {"megatron": {"rows": 1234} | dict.fromkeys(("memory", "time", "clean"), ERRORS)},
    ),
    lambda _: search._table(found := workbench.search(large_plan(), top=3), "Best", found.top),
    *(lambda _, number=number: side_by_side(number) for number in range(3)),
    lambda _: explain._cost("llama-3-70b on 128 GPUs", workbench.explain(large_plan()).cost),
    lambda _: explain._effects("Sensitivity", workbench.explain(large_plan()).tables()[0][1]),
    lambda _: operators._rows(choose_for_plan(large_plan().resolve(), 8)),
]


def words_of(text: str) -> set[str]:
    return {word for word in text.split() if set(word) != {"─"}}


def left_out(table: Grid, width: int) -> set[str]:
    empty = (c.header for c in table.columns if {str(cell) for cell in c.cells} == {"–"})
    names = [*table.optional, *map(str, empty)]
    listed = ", ".join([*names, ""])
    return set(f"left out at {width} columns: {listed} {' '.join(names)}".split())


@pytest.mark.parametrize("build", ORDINARY, ids=range(len(ORDINARY)))
def test_lines_break_at_spaces_at_80_columns(tmp_path: Path, build: Callable[..., Any]) -> None:
    table = build(tmp_path)
    text = shown(table, 80)
    assert max(map(len, text.splitlines())) <= 80
    assert words_of(text) <= words_of(shown(table)) | left_out(table, 80)


@pytest.mark.parametrize("build", [*TABLES, *ORDINARY], ids=range(len(TABLES + ORDINARY)))
def test_a_word_that_no_screen_holds_loses_its_middle_and_is_not_broken(
    tmp_path: Path, build: Callable[..., Any]
) -> None:
    table = build(tmp_path)
    text = shown(table, 40)
    whole = words_of(shown(table, 4000)) | left_out(table, 40)
    assert max(map(len, text.splitlines())) <= 40
    for word in words_of(text):
        head, cut, tail = word.partition("…")
        assert any(w == word or (cut and w.startswith(head) and w.endswith(tail)) for w in whole), (
            word
        )


@pytest.mark.parametrize("width", [80, 100, 120])
def test_words_break_at_spaces_on_a_terminal_and_nowhere_else(width: int) -> None:
    path = f"/home/{'folder/' * 30}plan.yaml"
    words = f"{explanation_words()}\n  written to {path}\n"
    for terminal in (True, False):
        screen = Console(file=io.StringIO(), width=width, force_terminal=terminal, no_color=True)
        print_words(screen, words)
        out = screen.file.getvalue()  # type: ignore[attr-defined]
        lines = [line for line in out.splitlines() if path not in line]
        assert out.split() == words.split(), "no word is cut"
        assert (max(map(cell_len, lines)) <= width) == terminal
    assert out == f"{words}\n"


def explanation_words() -> str:
    return "\n".join(workbench.explain(large_plan()).sentences)


@pytest.mark.parametrize("width", [80, 100])
def test_states_are_read_in_a_narrow_terminal(width: int) -> None:
    above, _, steps, below = explain._shown_states(workbench.states("7B"))
    assert isinstance(below, str) and "does not fit at any GPU count (118.6 GiB)" in below
    for table, most in ((above, 3), (steps, 1)):
        assert isinstance(table, Grid)
        rows = shown(table, width).partition("───")[2].splitlines()[1:]
        named = [row for row in rows if row.strip() and "left out" not in row]
        assert max(map(cell_len, rows)) <= width and len(named) <= most * table.row_count


def test_a_column_without_a_figure_is_left_out_first() -> None:
    table = tables.table("t", ("plan", "tokens/s", "last loss"), optional=("tokens/s",))
    table.add_row("a plan of some words", "1,234,567 tokens", "–")
    assert "left out at 45 columns: last loss\n" in shown(table, 45)


def test_what_is_left_out_is_named_and_only_where_it_must_be() -> None:
    table = tables.listing_table(catalog.gpus_listing([COMMON]))
    assert "left out" not in shown(table, 160) and "Rajbhandari" in shown(table, 160)
    assert "left out at 80 columns: source\n" in shown(table, 80) and "frontier-mi250x" in shown(
        table, 80
    )
    assert "left out at 60 columns: source, fabric\n" in shown(table, 60)


def test_figures_stay_with_their_units() -> None:
    stages = tables.stages_table(estimated())
    assert stages is not None
    assert "16.9 GiB" in shown(stages, 80)


def test_indents_and_wide_characters_are_measured() -> None:
    table = tables.table("t", ("what", "value"))
    table.add_row("  activations, peak", "显存显存显存显存显存显存")
    text = shown(table, 34)
    assert (
        "  activations," in text and max(map(cell_len, text.splitlines())) <= 34 and "显存…" in text
    )


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_piped_tables_are_as_wide_as_columns_says(
    ask: Ask, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    code, out, _ = ask("gpus")
    assert code == 0 and columns - 25 < max(map(len, out.splitlines())) <= columns


def test_ids_of_runs_keep_to_one_line(tmp_path: Path) -> None:
    run = listed_run(tmp_path)
    assert run.id in shown(tables.runs_table([run]), 80)


def test_runs_of_one_name_are_compared_with_the_fields_that_differ(
    ask: Ask, tmp_path: Path
) -> None:
    for name, seed in (("a", 0), ("b", 5)):
        ask(
            "plan",
            "--model",
            "tiny",
            "--gpu",
            "a100-sxm-80gb",
            "--gpus",
            "2",
            "--set",
            f"training.seed={seed}",
            "-o",
            tmp_path / f"{name}.yaml",
        )
    code, out, _ = ask("compare", tmp_path / "a.yaml", tmp_path / "b.yaml", "--no-rehearse")
    told = [
        line.split()
        for line in out.splitlines()
        if line.startswith((" training", " strategy", " cluster"))
    ]
    assert code == 0 and told == [["training.seed", "0", "5"]] and "not run" in out


def test_tables_are_made_in_one_place() -> None:
    for path in Path(workbench.__file__).parent.joinpath("cli").rglob("*.py"):
        names = {
            node.module
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.ImportFrom)
        }
        assert path.name == "terminal.py" or not names & {
            "rich.table",
            "rich.console",
            "rich.markup",
        }, path.name


def test_a_run_that_failed_in_gloo_is_listed_and_hides_no_other(ask: Ask, tmp_path: Path) -> None:
    for name in ("broken", "fine"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "plan.yaml").write_text(
            "model: tiny-gpt\ncluster: {gpu: local, gpus: 1}\n"
        )
        write_state(tmp_path / name, first_state(2, 20))
    hostile_run(tmp_path / "broken")
    code, out, _ = ask("runs", "--root", tmp_path)
    assert (
        code == 0
        and "fine" in out
        and "[/__w/pytorch" in out.replace("\n", "").replace(" ", "")
        and "\x1b" not in out
    )


@pytest.mark.parametrize("verb", ["estimate", "explain", "plan"])
def test_a_plan_may_have_any_name(ask: Ask, verb: str) -> None:
    code, out, _ = ask(verb, "--model", "tiny-gpt", "--set", 'name="[/x]\\e[31m"')
    assert code == 0 and "[/x]" in out and "\x1b" not in out


def test_an_unknown_key_is_named_without_its_escapes(ask: Ask) -> None:
    code, _, err = ask("estimate", "--model", "tiny-gpt", "--set", "training.st\x1b[2Jeps=3")
    assert code == 2 and "st[2Jeps" in err and "\x1b" not in err


def test_text_keeps_lines_tabs_and_other_scripts() -> None:
    assert visible("a\n\tb שלום ۱۲ é") == "a\n\tb שלום ۱۲ é"
    assert visible("name-\udcff") == "name-\ufffd"
