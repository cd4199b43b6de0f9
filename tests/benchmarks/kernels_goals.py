"""What the kernels are meant to reach, beside what they were measured at."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

WIDE = 4096
"""Width from which an operator must come near to the copy bandwidth."""
SHARE = 0.9
CHUNKED = 0.95
"""Of the speed of compiled runs of tokens, which the head must reach at no higher peak."""
PEAK, LARGE = 0.25, 32768
"""Of eager's peak, at vocabularies no smaller than this."""
STEP = 1.2
"""Times eager's speed, of a whole step."""
EDGE = {"cuda": 0.98, "cpu": 0.95}
"""A ratio counts as equal from here: what two timings of the same differ by."""

PEERS = ("eager", "liger")
"""Than which ours may not be slower: where a seam of the models is not always our operator, what it
is.
"""

Check = tuple[str, str, float, bool]
"""(goal, where, value, met)."""


def checks(found: dict[str, Any]) -> Iterator[Check]:
    """Every goal that has a figure. Bandwidth and a step's speed are goals on cards alone."""
    for row in found.get("kernels", []):
        if found["kind"] == "cuda":
            yield from _bandwidth(row)
    for name, seconds in _totals(found.get("kernels", [])):
        for peer in PEERS:
            if seconds.get(peer):
                ratio = seconds[peer] / seconds.get("seam", seconds["fused"])
                yield (
                    f"no slower than {peer}, forward and backward",
                    name,
                    ratio,
                    ratio >= EDGE[found["kind"]],
                )
    for row in found.get("linear_cross_entropy", []):
        yield from _head(row)
    if found["kind"] == "cuda" and "step" in found:
        speed = found["step"]["seconds"]["eager"] / found["step"]["seconds"]["fused"]
        yield f"a step at least {STEP} times as fast as eager", "step", speed, speed >= STEP


def _bandwidth(row: dict[str, Any]) -> Iterator[Check]:
    if row["width"] >= WIDE and row["bytes"]:
        share = row["share_of_copy"]
        yield (
            f"at least {SHARE:.0%} of the copy bandwidth at width {WIDE} or more",
            label(row),
            share,
            share >= SHARE,
        )


def _totals(rows: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, float]]]:
    """Each operator and shape: seconds of all its passes together."""
    together: dict[str, dict[str, float]] = {}
    for row in rows:
        seconds = together.setdefault(label(row | {"pass": ""}), {})
        for name, value in row["seconds"].items():
            if value is not None:
                seconds[name] = seconds.get(name, 0.0) + value
    yield from together.items()


def _head(row: dict[str, Any]) -> Iterator[Check]:
    seconds, peaks = row["seconds"], row["peak_bytes"]
    speed, share = seconds["compiled_chunked"] / seconds["fused"], peaks["fused"] / peaks["eager"]
    same = peaks["fused"] / peaks["compiled_chunked"]
    yield (
        f"head: at least {CHUNKED} times the speed of compiled chunks",
        label(row),
        speed,
        speed >= CHUNKED,
    )
    yield "head: no higher a peak than compiled chunks", label(row), same, same <= 1 / EDGE["cuda"]
    if row["shape"][-1] >= LARGE:
        yield f"head: at most {PEAK:.0%} of eager's peak", label(row), share, share <= PEAK


def label(row: dict[str, Any]) -> str:
    """Operator, shape and pass of a row."""
    shape = row.get("shape") or [*row["tokens"], row["model"]["hidden"]]
    words = (
        row["kernel"],
        row.get("case", ""),
        str(shape),
        row.get("dtype", ""),
        row.get("pass", ""),
    )
    return " ".join(word for word in words if word)


def summary(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Goal by goal: how often it was met, and where it was missed."""
    told: dict[str, dict[str, Any]] = {}
    for goal, where, value, met in checks(found):
        own = told.setdefault(goal, {"goal": goal, "met": 0, "of": 0, "missed": []})
        own["of"] += 1
        own["met"] += met
        own["missed"] += [] if met else [f"{where}: {value:.2f}"]
    return list(told.values())


def line(row: dict[str, Any], kind: str) -> str:
    """A row for people: time, share of the copy bandwidth, how many times as long the others take,
    peaks, rates.
    """
    seconds, fused = row["seconds"], row["seconds"]["fused"]
    told = [f"{label(row):68} {fused * 1e6:9.1f} us"]
    if "share_of_copy" in row:
        judged = (
            "".join(f" (goal {SHARE:.0%}: {_word(met)})" for *_, met in _bandwidth(row))
            if kind == "cuda"
            else ""
        )
        told.append(f"{row['share_of_copy']:4.0%} of copy{judged}")
    own = seconds.get("seam") or fused
    for name, value in seconds.items():
        if value and name != "fused":
            judged = (
                f" ({_word(value / own >= EDGE[kind])})"
                if name in PEERS and "share_of_copy" in row
                else ""
            )
            told.append(f"{name} {value / fused:.2f}x{judged}")
    told += [
        f"peak of {name} {value / 2**20:.0f} MiB"
        for name, value in row.get("peak_bytes", {}).items()
        if value
    ]
    told += [
        f"{name} {value:.0f} tokens/s" for name, value in row.get("tokens_per_second", {}).items()
    ]
    return "  ".join(told)


def verdicts(row: dict[str, Any], found: dict[str, Any]) -> str:
    """The goals of the head at one shape, or of a step, a line each."""
    several = (
        _head(row)
        if "compiled_chunked" in row["seconds"]
        else checks({"kind": found["kind"], "step": row})
    )
    return "".join(f"\n    {goal}: {value:.2f}, {_word(met)}" for goal, _, value, met in several)


def _word(met: bool) -> str:
    return "met" if met else "missed"
