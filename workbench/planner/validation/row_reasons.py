"""What would help where a row is not predicted, or is predicted far from anything measured."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path
from typing import Any

import pandas as pd

from workbench import data_files
from workbench.costmodel.frameworks.framework_profile import fallback_framework
from workbench.costmodel.rates.fitted_constants import fitted_document
from workbench.machine import gpu_catalog
from workbench.planner.published_steps import measured_steps
from workbench.planner.validation.cell_parsers import RUN_STATUSES, report_year
from workbench.planner.validation.framework_names import find_framework, framework_defaults
from workbench.planner.validation.measured_rows import read_measured_rows

PUBLISHED_ROWS = "data/validation/published.csv.gz"

REMEDIES = (
    ("missing mbs", "give mbs, or gbs with grad_accum"),
    ("missing gbs", "give gbs, or mbs with grad_accum"),
    ("missing n_gpus", "give n_gpus, or dp with the other axes"),
    ("missing vocab", "give vocab, params_b or the tokenizer"),
    (
        "missing layers",
        "give layers; or hidden, heads, ffn, vocab and params_b; or a catalog model",
    ),
    ("missing", "give that column, or the name of a model of the catalog (workbench models)"),
    ("batch fields contradict", "correct gbs, mbs, dp or grad_accum: gbs = mbs x dp x grad_accum"),
    (
        "layout contradicts",
        "correct n_gpus or the axes: n_gpus = dp x tp x pp x cp, ep divides dp x cp",
    ),
    (
        "impossible shape",
        "correct hidden, heads, kv_heads, head_dim or ffn: heads divide hidden, kv_heads heads",
    ),
    ("impossible", "correct that cell: a positive whole number that can be meant, or nothing"),
    ("more pipeline stages", "correct pp and vpp: pp x vpp is at most layers, or layers + 2"),
    ("experts spread", "name a framework whose defaults say how many tensor ranks split an expert"),
    (
        "latent attention",
        "say kv_lora_rank, qk_rope_head_dim, qk_nope_head_dim, v_head_dim in arch",
    ),
    ("sliding window", "say the window's tokens in arch, or name a model of the catalog"),
    ("mixture of experts", "give n_experts and topk, and moe_ffn N in arch"),
    ("precision fp4", "none yet: of 4 bits a plan has nvfp4, on GPUs that have it"),
    ("GPU unknown", "name a GPU of the catalog (workbench gpus)"),
    ("not a measurement", "none: formulas are not validated against"),
    ("not a dense decoder", "none yet: a plan's model is a decoder of attention and feed-forward"),
    ("options stand in a footnote", "give the footnote's text in notes"),
    ("attention is", "correct attn_impl or framework"),
    ("adapters of unknown rank", "say rank N in notes"),
    ("illegal", "correct that field; `workbench check` says what is legal"),
)
"""(beginning of a reason, what would make such a row predictable); the first that fits."""
NO_REMEDY = "none yet: a plan cannot say it"
CALIBRATE = "one measured run of your own: workbench calibrate --from"
_VERSION = re.compile(r"(?<![\w.])v?(\d+(?:\.\d+)+)")


def remedy(reason: str) -> str:
    """What would make rows that were left out for `reason` predictable."""
    return next((said for start, said in REMEDIES if reason.startswith(start)), NO_REMEDY)


def cautions(table: pd.DataFrame) -> list[dict[str, Any]]:
    """What is doubtful about predicted rows, each with their number and what would help.

    Rows that contradict themselves; frameworks and versions that no published row has; GPUs of a
    generation on which no step was published. Their predictions have the interval of an unknown
    framework, or of their own one elsewhere.

    Args:
        table: Predictions with the columns of `validate.COLUMNS`, `suspect` and `unknown_status`.
    """
    odd = table[table.unknown_status != ""]
    words = ", ".join(f"'{said}'" for said in sorted(set(odd.unknown_status))[:5])
    found = [
        _caution(
            odd, f"say a status that is not known ({words}): taken as runs", f"say {RUN_STATUSES}"
        ),
        _caution(
            table[table.suspect],
            "contradict themselves: printed rate against batch, shape and time, or against the "
            "GPU's peak",
            "correct gbs, iter_time_s or tflops_gpu",
        ),
    ]
    for profile, part in table.groupby("predicted_with"):
        found.append(_of_profile(str(profile), part))
    for framework, part in table.groupby("framework"):
        found += [_of_version(str(framework), part), _of_later(str(framework), part)]
    for name, part in table.groupby("card"):
        found.append(_of_gpu(str(name), part))
    return [one for one in found if one]


def _of_profile(profile: str, part: pd.DataFrame) -> dict[str, Any] | None:
    """The framework, where none of its rows was published."""
    if profile == fallback_framework():
        names = ", ".join(sorted({str(name) or "none given" for name in part.framework})[:5])
        what = f"name no framework that has a profile ({names}): predicted as {profile}"
        return _caution(part, what, f"name one of {', '.join(sorted(framework_defaults()))}")
    if f"framework.{profile}" in fitted_document().get("constants", {}):
        return None
    what = f"use framework profile {profile}, of which no clean row was published"
    return _caution(part, what, CALIBRATE)


def _of_version(framework: str, part: pd.DataFrame) -> dict[str, Any] | None:
    """A version in the framework's name that no published row has."""
    said, published = set(_VERSION.findall(framework)), published_versions().get(_family(framework))
    if not said or published is None or said & published[0]:
        return None
    what = f"ran {framework}, a version that no published row has"
    return _caution(part, what, CALIBRATE)


def _of_later(framework: str, part: pd.DataFrame) -> dict[str, Any] | None:
    """Reports later than every published one of the framework."""
    newest = published_versions().get(_family(framework), ((), None))[1]
    if newest is None:
        return None
    years = [report_year(f"{source} {name}") for source, name in zip(part.source, part["table"])]
    later = part[[year is not None and year > newest for year in years]]
    what = f"report {framework} later than {newest:.2f}, the newest published year and month"
    return _caution(later, what, CALIBRATE)


@lru_cache(maxsize=1)
def published_versions() -> dict[str, tuple[set[str], float | None]]:
    """Versions in frameworks' names, and the newest year and month of a report, of the published
    rows by framework profile.
    """
    found: dict[str, tuple[set[str], float | None]] = {}
    for row in read_measured_rows(Path(data_files.assets() / PUBLISHED_ROWS)):
        versions, newest = found.get(_family(row.framework), (set(), None))
        year = report_year(f"{row.source} {row.table}")
        newest = max(filter(None, (newest, year)), default=None)
        found[_family(row.framework)] = versions | set(_VERSION.findall(row.framework)), newest
    return found


def _family(framework: str) -> str:
    return find_framework(framework, sharded=False, flash=True).family


def _of_gpu(name: str, part: pd.DataFrame) -> dict[str, Any] | None:
    """The GPU, where no step was published of its generation."""
    known = gpu_catalog.gpus()
    generation = known[name].gpu.architecture if name in known else ""
    measured = {step.gpu for step in measured_steps()} & known.keys()
    if generation in {known[gpu].gpu.architecture for gpu in measured}:
        return None
    what = f"ran on {name}, of whose generation no clean step was published"
    return _caution(part, what, CALIBRATE)


def _caution(rows: pd.DataFrame, what: str, help_: str) -> dict[str, Any] | None:
    if rows.empty:
        return None
    return {
        "rows": len(rows),
        "what": what,
        "help": help_,
        "first": [str(row) for row in rows["row"][:3]],
    }
