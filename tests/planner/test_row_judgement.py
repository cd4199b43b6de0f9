"""Sites, groups and flags of published rows: from the row alone, never from its outcome."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from workbench.planner.validation.measured_rows import MeasuredRow, parse_row, read_measured_rows
from workbench.planner.validation.row_judgement import (
    RowJudgement,
    judge_row,
    judge_rows,
    published_judgements,
)

ROOT = Path(__file__).parents[2]
PUBLISHED = ROOT / "data/validation/published.csv.gz"
CELLS: dict[str | None, object] = {
    "id": "a",
    "source": "github:mosaicml/llm-foundry@8c8dd48 README.md",
    "model": "mpt-7b",
    "gpu": "A100-80GB",
    "gpu_mem_gb": "80",
    "n_gpus": "8",
    "gbs": "64",
    "iter_time_s": "2.5",
}


def judged(**changed: str) -> RowJudgement:
    cells = dict(CELLS)
    for name, text in changed.items():
        cells[name] = text
    return judge_row(parse_row(cells), contradicts=False)


@pytest.fixture(scope="module")
def rows() -> list[MeasuredRow]:
    return read_measured_rows(PUBLISHED)


def test_a_site_is_organisation_cluster_and_gpu() -> None:
    assert judged().site == "mosaicml/cloud/a100-sxm-80gb"
    assert judged(gpu="H100-SXM-80GB").site == "mosaicml/cloud/h100-sxm-80gb"
    assert judged(source="somebody's own log").site == ""


def test_plans_are_ranked_within_page_model_gpus_and_batch() -> None:
    assert judged().group == "llm-foundry mpt-7b x8 b64"
    assert len({judged().group, judged(n_gpus="16").group, judged(gbs="128").group}) == 3


@pytest.mark.parametrize(
    ("changed", "flag"),
    [
        ({"notes": "layers derived from Sec/it x TFLOPs arithmetic"}, "inferred"),
        ({"notes": "grad_accum=1 assumed; vocab assumed 50304"}, "inferred"),
        ({"notes": "Baseline (unpacked, AdamW bf16)"}, "inferred"),
        ({"verify": "read; shape inferred"}, "inferred"),
        (
            {"notes": "Llama3 8B per the TorchAO page it cites (not stated on this page)"},
            "inferred",
        ),
        ({"model": "GPT3-5B", "verify": "read (GPT3-5B/20B shapes recalled)"}, "inferred"),
        ({"kind": "measured (author warns +-40% from network noise)"}, "noisy"),
        ({"gpu": "H100-SXM 96GB HBM2e 500W"}, "power_limited"),
        ({"gpu": "H100-SXM 95GB HBM2e", "gpu_mem_gb": "95"}, "power_limited"),
        ({"notes": "GPUs are power limited"}, "power_limited"),
        ({"notes": "row labels look mixed up"}, "contradiction"),
    ],
)
def test_what_a_row_says_of_itself_flags_it(changed: dict[str, str], flag: str) -> None:
    assert judged().flags == ()
    assert judged(**changed).flags == (flag,)


def test_a_padded_vocabulary_and_a_derived_time_infer_no_shape() -> None:
    assert judged(notes='vocab "250k" (padded 250880 assumed); iter_time derived').flags == ()
    recalled_shapes = "read (GPT3-5B/20B shapes recalled)"
    assert judged(model="Llama-2-7B", verify=recalled_shapes).flags == ()


def test_an_inferred_shape_stays_one_whatever_its_page_prints() -> None:
    """That printed utilisations reproduce with it is known from outcomes alone."""
    row = parse_row({**CELLS, "verify": "read; shape inferred", "mfu_pct": "40"})
    assert judge_row(row, contradicts=False).flags == ("inferred",)


def test_outcomes_change_no_judgement(rows: list[MeasuredRow]) -> None:
    """Ten times the memory, and steps ten times as long at a tenth of the printed rates."""

    def scaled(row: MeasuredRow) -> MeasuredRow:
        seconds, tflops, share = row.step_seconds, row.tflops, row.utilisation
        samples, tokens, memory = row.samples_per_second, row.tokens_per_second, row.memory_gib
        return replace(
            row,
            step_seconds=seconds and 10 * seconds,
            samples_per_second=samples and samples / 10,
            tokens_per_second=tokens and tokens / 10,
            tflops=tflops and tflops / 10,
            utilisation=share and max(share / 10, 0.001),
            memory_gib=memory and 10 * memory,
        )

    without_rounding = [row for row in rows[::7] if not row.utilisation]
    assert judge_rows(without_rounding) == judge_rows([scaled(row) for row in without_rounding])


def test_the_committed_file_is_what_the_command_writes(rows: list[MeasuredRow]) -> None:
    assert published_judgements() == {row.label: one for row, one in zip(rows, judge_rows(rows))}


def test_every_committed_row_has_a_site_and_is_there_once() -> None:
    with (ROOT / "data/validation/judgement.csv").open(encoding="utf-8", newline="") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == len({line["id"] for line in lines}) == len(published_judgements())
    assert all(line["site"].count("/") == 2 and line["group"] for line in lines)
