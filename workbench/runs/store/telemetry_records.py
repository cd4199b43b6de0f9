"""Telemetry records of ranks: their kinds, their fields, and the files they are in.

Telemetry is one JSON object a line, one `write()` a line, one file a rank
(`telemetry/rank00000.jsonl`), append-only. Every record has `kind` and `t` (seconds of the rank's
monotonic clock; `hello` carries the offset to the epoch).

A record is checked once, by `checked`, where it is read. Whoever gets it from a `Reader` may trust
that every field of its kind is there, of the type that `FIELDS` says.
"""

from __future__ import annotations

from typing import Any

from workbench.safe_io.json_field_checks import (
    Check,
    flag,
    has,
    number,
    object_,
    one_of,
    or_null,
    rows,
    text,
    whole,
)
from workbench.vocabulary import ALLOCATED, CATEGORIES, MEMORY_COUNTERS, MOMENTS, REWARDS, TIERS

FIELDS: dict[str, dict[str, Check]] = {
    "hello": {
        "rank": whole,
        "world_size": whole,
        "local_rank": whole,
        "pid": whole,
        "host": text,
        "backend": or_null(text),
        "device": text,
        "gpu": or_null(object_),
        "epoch_offset": number,
        "coordinates": object_,
        "stage": or_null(whole),
        "versions": object_,
    },
    "phase": {"phase": text, "step": or_null(whole), "detail": or_null(text)},
    "step": {
        "step": whole,
        "loss": or_null(number),
        "seconds": number,
        "cpu_seconds": or_null(number),
        "data_seconds": or_null(number),
        "own_seconds": or_null(object_),
        "tokens": number,
        "trained_tokens": or_null(number),
        "by_source": or_null(rows({"source": text, "loss": or_null(number), "tokens": number})),
        **dict.fromkeys(REWARDS, or_null(number)),
        "gradient_norm": or_null(number),
        "learning_rate": or_null(number),
        "loss_scale": or_null(number),
        "skipped": or_null(flag),
        "bytes": or_null(number),
        **dict.fromkeys(MEMORY_COUNTERS, or_null(number)),
        "action": or_null(text),
    },
    "memory": {
        "step": whole,
        "rows": rows(
            {
                "stage": or_null(whole),
                "moment": one_of(*MOMENTS),
                "tier": one_of(*TIERS),
                "category": one_of(*CATEGORIES, ALLOCATED),
                "bytes": number,
            }
        ),
    },
    "timeline": {
        "step": whole,
        "rows": rows(
            {
                "stage": or_null(whole),
                "microbatch": or_null(whole),
                "action": text,
                "start": number,
                "end": number,
            }
        ),
    },
    "collectives": {
        "step": whole,
        "rows": rows(
            {
                "axis": text,
                "kind": text,
                "group_size": whole,
                "dtype": or_null(text),
                "bytes": number,
                "count": number,
                "action": or_null(text),
                "seconds": or_null(number),
            }
        ),
    },
    "evaluation": {
        "step": whole,
        "loss": or_null(number),
        **dict.fromkeys(REWARDS, or_null(number)),
        "by_source": or_null(rows({"source": text, "loss": or_null(number)})),
    },
    "checkpoint": {"step": whole, "path": text, "seconds": or_null(number)},
    "unsaved": {"step": whole, "message": text},
    "bye": {"step": or_null(whole)},
}
"""Kind -> its fields, each with what may stand in it; a value that is not known is null."""

NULLS = {kind: dict.fromkeys(fields) for kind, fields in FIELDS.items()}
"""Kind -> its fields, none of them known."""

PHASES = ("building", "compiling", "training", "evaluating", "checkpointing", "done")
"""What a rank is busy with, in records of kind `phase`."""


def checked(record: Any) -> dict[str, Any] | None:
    """`record` with null for each field of its kind that it lacks; None where it is no record, or a
    damaged one.

    A kind that this version does not know passes as it is.
    """
    if (
        type(record) is not dict
        or type(kind := record.get("kind")) is not str
        or not number(record.get("t"))
    ):
        return None
    fields = FIELDS.get(kind, {})
    return {**NULLS.get(kind, {}), **record} if has(record, fields) else None
