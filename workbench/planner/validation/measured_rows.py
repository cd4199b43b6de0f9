"""Published measurements: a CSV file in the schema of one row a configuration, read into typed rows
in fixed units.

Columns are found by their names, in any order; one that is missing counts as empty. Times become
seconds, memory GiB.
"""

from __future__ import annotations

import csv
import gzip
import re
import string
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.errors import refuse
from workbench.planner.validation import cell_parsers

COLUMN_ALIASES = {
    "micro_batch": "mbs",
    "micro_batch_size": "mbs",
    "global_batch": "gbs",
    "global_batch_size": "gbs",
    "gradient_accumulation": "grad_accum",
    "ga": "grad_accum",
    "gpus": "n_gpus",
    "num_gpus": "n_gpus",
    "sequence_length": "seq",
    "seq_len": "seq",
    "num_layers": "layers",
    "hidden_size": "hidden",
    "num_heads": "heads",
    "vocab_size": "vocab",
    "mem_gb": "mem_gib",
    "memory_gib": "mem_gib",
    "iter_time": "iter_time_s",
    "step_time_s": "iter_time_s",
    "zero": "zero_stage",
    "stack": "framework",
}
"""Other spellings of a column's name."""
UTF16_STARTS = ("\ufffd\ufffd", "\0", *(f"{letter}\0" for letter in string.printable))
"""What a mark of byte order, or a first letter without one, is when read as UTF-8."""


@dataclass(frozen=True)
class MeasuredRow:
    """One configuration and what was measured of it; None or "" where the table does not say."""

    file: str
    line: int
    id: str
    source: str
    table: str
    kind: str
    """measured, chart reading or formula, with what the page says of it."""
    verification: str
    """How the row was read, and which of its cells were not."""
    measured: bool
    """Whether the figures come from a run, not from a formula."""
    framework: str
    model: str
    arch: str
    parameters: float | None
    layers: int | None
    hidden: int | None
    ffn: int | None
    heads: int | None
    kv_heads: int | None
    head_dim: int | None
    vocab: int | None
    sequence: int | None
    tied: bool | None
    gated: bool | None
    experts: int | None
    top_k: int | None
    gpu: str
    gpu_memory: float | None
    gpus: int | None
    tensor: int
    pipeline: int
    chunks: int | None
    context: int
    expert: int
    says_expert: bool
    """Whether the size of expert parallelism is stated, not taken for one."""
    data: int | None
    zero: int | None
    sharding: str
    sequence_parallel: bool | None
    micro_batch: int | None
    batch: int | None
    accumulation: int | None
    precision: str
    recompute: str
    schedule: str
    attention: str
    tflops: float | None
    tflops_kind: str
    memory_gib: float | None
    memory_kind: str
    """What was read, where the table says so for certain."""
    memory_reading: str
    """The kind of reading that its words are nearest to."""
    memory_of_first_stage: bool
    """Whether it was read on the rank that logs, which is of the first stage, not on the one with
    the most memory.
    """
    is_bare_gb: bool
    """Whether the memory's unit is a bare GB, which may be 2**30 or 1e9 bytes."""
    flagged_by_source: bool
    """Whether the table itself warns of the row."""
    status: str
    """ran | out_of_memory | failed."""
    unknown_status: str
    """What the cell says, where it says none of them: the row ran as far as anything is measured.
    """
    notes: str
    step_seconds: float | None
    samples_per_second: float | None
    tokens_per_second: float | None
    utilisation: float | None
    """Model FLOPs utilisation as printed, a share."""
    impossible: tuple[str, ...]
    """Columns whose cell is a number that no such count can be."""

    @property
    def text(self) -> str:
        """All that is said in words, lower case."""
        return " ".join(
            (self.framework, self.model, self.arch, self.table, self.precision, self.notes)
        ).lower()

    @property
    def label(self) -> str:
        """How the row is called in a report."""
        return self.id or f"{self.file}:{self.line}"


def read_measured_rows(path: str | Path) -> list[MeasuredRow]:
    """Every row of the CSV file `path`, which may be gzipped (.gz).

    Raises `PlanError` where it cannot be read or is not UTF-8, or has no header or two columns of
    one meaning.
    """
    path = Path(path)
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8-sig", errors="replace", newline="") as file:
            return _rows(path, csv.DictReader(_csv_lines(path, file)))
    except (OSError, EOFError, zlib.error) as error:
        why = getattr(error, "strerror", None) or error
        raise refuse(str(path), f"cannot be read: {why}") from None
    except csv.Error as error:
        raise refuse(str(path), f"is not a CSV file: {error}") from None


def _rows(path: Path, table: csv.DictReader[str]) -> list[MeasuredRow]:
    _check_columns(path, table.fieldnames or ())
    return [parse_row(cells, path.name, table.line_num) for cells in table]


def _check_columns(path: Path, names: Sequence[str]) -> None:
    """Every column has a meaning of its own: of two, one would silently be lost."""
    if not names:
        raise refuse(str(path), "is empty; legal: a CSV file with a header line")
    seen: dict[str, int] = {}
    for at, name in enumerate(names):
        meaning = _canonical_column(name)
        if meaning and meaning in seen:
            first = seen[meaning]
            raise refuse(
                f"{path}, line 1",
                f"columns {first + 1} '{names[first]}' and {at + 1} '{name}' both mean "
                f"{meaning}; legal: one column of each name",
            )
        seen[meaning] = at


def _csv_lines(path: Path, lines: Iterable[str]) -> Iterator[str]:
    """Lines as the csv module takes them: it refuses NUL."""
    for at, line in enumerate(lines):
        if at == 0 and line.startswith(UTF16_STARTS):
            raise refuse(str(path), "begins like UTF-16, not UTF-8; legal: save it as UTF-8")
        yield line.replace("\0", "")


def parse_row(cells: Mapping[str | None, object], file: str = "", line: int = 0) -> MeasuredRow:
    """One line of a table, by column name, as a `MeasuredRow`; never raises."""
    cell = {
        _canonical_column(key): str(value).strip()
        for key, value in cells.items()
        if key and isinstance(value, str)
    }
    get = cell.get
    memory = cell_parsers.memory_gib(
        get("mem_gib", ""), f"{get('mem_unit', '')} {_decimal_unit(get('mem_kind', ''))}"
    )
    times = _job_times(cell)
    measured = memory is not None or any(times)
    known = cell_parsers.run_status(get("status", ""), measured)
    said = get("kind", "").lower()
    billions, share = (
        cell_parsers.parse_number(get("params_b", "")),
        cell_parsers.parse_number(get("mfu_pct", "")),
    )
    return MeasuredRow(
        file=file,
        line=line,
        source=get("source", "") or file,
        table=_table_name(get("table", "")),
        measured=not any(
            word in said for word in ("formula", "theor", "arithmetic", "simulat", "estimate")
        ),
        parameters=billions * 1e9 if billions else None,
        **_named_cells(cell),
        gpu_memory=cell_parsers.parse_number(get("gpu_mem_gb", "")) or None,
        zero=cell_parsers.zero_stage(
            get("zero_stage", ""), get("sharding", "") or _zero_stage_in_name(get("table", ""))
        ),
        tflops=cell_parsers.parse_number(get("tflops_gpu", "")) or None,
        memory_gib=memory,
        memory_kind=cell_parsers.memory_kind(get("mem_kind", "")),
        memory_reading=cell_parsers.nearest_memory_kind(get("mem_kind", "")),
        memory_of_first_stage="logging rank" in get("mem_kind", ""),
        is_bare_gb=cell_parsers.is_bare_gb(get("mem_unit", "")),
        flagged_by_source=cell_parsers.is_flagged_by_source(
            " ".join(get(name, "") for name in ("kind", "table", "status", "notes"))
        ),
        status=known or ("ran" if measured else "failed"),
        unknown_status="" if known else get("status", ""),
        step_seconds=times[0],
        samples_per_second=times[1],
        tokens_per_second=times[2],
        utilisation=share / 100 if share else None,
        impossible=tuple(_impossible_counts(cell)),
    )


def _named_cells(cell: Mapping[str, str]) -> dict[str, Any]:
    """Fields that are read from a column of their own: texts, yes or no, and counts."""
    get = cell.get
    texts = {name: get(column, "") for name, column in TEXT_COLUMNS.items()}
    said = {name: cell_parsers.yes_or_no(get(of, "")) for name, of in YES_OR_NO_COLUMNS.items()}
    counts = {
        name: _plausible_count(name, cell_parsers.positive_integer(get(column, "")))
        for name, column in COUNT_COLUMNS.items()
    }
    sizes = {name: counts[name] or 1 for name in AXIS_SIZES}
    return {**texts, **said, **counts, **sizes, "says_expert": counts["expert"] is not None}


TEXT_COLUMNS = {
    "id": "id",
    "kind": "kind",
    "verification": "verify",
    "framework": "framework",
    "model": "model",
    "arch": "arch",
    "gpu": "gpu",
    "sharding": "sharding",
    "precision": "precision",
    "recompute": "recompute",
    "schedule": "schedule",
    "attention": "attn_impl",
    "tflops_kind": "tflops_kind",
    "notes": "notes",
}
"""Field -> column of what is taken as it is written."""
YES_OR_NO_COLUMNS = {"tied": "tied_emb", "gated": "gated_ffn", "sequence_parallel": "seq_parallel"}
"""Field -> column of what is so or not."""
COUNT_COLUMNS = {
    "layers": "layers",
    "hidden": "hidden",
    "ffn": "ffn",
    "heads": "heads",
    "kv_heads": "kv_heads",
    "head_dim": "head_dim",
    "vocab": "vocab",
    "sequence": "seq",
    "experts": "n_experts",
    "top_k": "topk",
    "gpus": "n_gpus",
    "tensor": "tp",
    "pipeline": "pp",
    "chunks": "vpp",
    "context": "cp",
    "expert": "ep",
    "data": "dp",
    "micro_batch": "mbs",
    "batch": "gbs",
    "accumulation": "grad_accum",
}
"""Field -> column of the positive integers."""
AXIS_SIZES = ("tensor", "pipeline", "context", "expert")
"""Counts that are 1 where a table says nothing."""


MAX_COUNT = {
    "layers": 2**12,
    "hidden": 2**20,
    "ffn": 2**22,
    "vocab": 2**24,
    "sequence": 2**30,
    "batch": 2**24,
    "gpus": 2**20,
}
MAX_OTHER_COUNT = 2**16
"""Largest counts that can be meant; what is larger was misread."""


NEVER_ZERO = frozenset({"layers", "hidden", "heads", "vocab", "seq", "n_gpus", "mbs", "gbs"})
"""Columns in which 0 does not say that there is none."""


def _impossible_counts(cell: Mapping[str, str]) -> Iterator[str]:
    """Columns of counts that hold a negative, fractional or far too large number."""
    for name, column in COUNT_COLUMNS.items():
        value = cell_parsers.plain_number(cell.get(column, ""))
        if value is None or (value == 0 and column not in NEVER_ZERO):
            continue
        if value != int(value) or not 0 < value <= MAX_COUNT.get(name, MAX_OTHER_COUNT):
            yield column


def _plausible_count(name: str, value: int | None) -> int | None:
    return value if value is not None and value <= MAX_COUNT.get(name, MAX_OTHER_COUNT) else None


def _job_times(cell: Mapping[str, str]) -> tuple[float | None, float | None, float | None]:
    """(seconds of a step, samples a second, tokens a second) of the whole job, as far as
    printed.
    """
    gpus = cell_parsers.positive_integer(cell.get("n_gpus", ""))
    tokens, own = (
        cell_parsers.parse_number(cell.get(name, ""))
        for name in ("tokens_per_s", "tokens_per_s_gpu")
    )
    total = tokens or (own * gpus if own and gpus else None)
    return (
        cell_parsers.duration_seconds(cell.get("iter_time_s", "")),
        cell_parsers.parse_number(cell.get("samples_per_s", "")) or None,
        total,
    )


def _decimal_unit(kind: str) -> str:
    """What the kind of memory says about the unit: only that a figure was divided by 1e9."""
    return "1e9" if "1e9" in kind else ""


def _zero_stage_in_name(table: str) -> str:
    """The stage of ZeRO that a table is named for; nothing where it names several."""
    stages = re.findall(r"zero[- ]?[0-3]\b", table, re.IGNORECASE)
    return stages[0] if len(stages) == 1 else ""


def _table_name(text: str) -> str:
    """The table's name without the line on which the row stands."""
    return re.sub(r"[,;]?\s*\(?(line|row) \d+\)?$", "", text)


def _canonical_column(name: str) -> str:
    plain = name.strip().lower().replace(" ", "_").replace("-", "_")
    return COLUMN_ALIASES.get(plain, plain)
