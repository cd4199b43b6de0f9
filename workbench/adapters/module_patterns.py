"""Regular expressions of a file, matched against names of modules within a time limit.

A pattern of a few characters may take Python's `re` longer than anyone waits (CWE-1333), and
nothing ends a match of this process but a signal to its main thread. So patterns that repeat, or
many of them, are matched in a child process, which is killed when the time is over.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

SECONDS = 10.0
"""When a file's patterns are given up."""
MOST_MATCHES = 100_000
"""Matches of patterns without repetition that are made in this process."""
_REPEATS = re.compile(r"[*+?{]")
_CHILD = """
import json, re, sys
asked = json.load(sys.stdin)
for _, rule, complete in asked["patterns"]:
    compiled = re.compile(rule)
    match = compiled.fullmatch if complete else compiled.match
    tried = ((name, match(name)) for name in asked["names"])
    print(json.dumps({name: found[compiled.groups and 1] for name, found in tried if found}))
    sys.stdout.flush()
"""


class Pattern(NamedTuple):
    """A pattern of a file."""

    given: str
    """As the file has it."""
    rule: str
    """The complete regular expression."""
    complete: bool = False
    """Whether it is to match names to their end."""


class SlowPattern(Exception):
    """A pattern, its argument, was not matched in time."""


def match_modules(
    patterns: Sequence[Pattern], names: Iterable[str], seconds: float = SECONDS
) -> Mapping[Pattern, Mapping[str, str | None]]:
    """Each pattern -> the names that it matches from their start, with its first group, or with
    the match where it has none.

    Args:
        patterns: Patterns that compile.
        names: Names of modules.
        seconds: For all of them.

    Raises:
        SlowPattern: The first that was not done in time, or in memory.
    """
    patterns, names = list(dict.fromkeys(patterns)), list(names)
    few = len(patterns) * len(names) <= MOST_MATCHES
    if few and not any(_REPEATS.search(one.given) for one in patterns):
        return {one: _matches(one, names) for one in patterns}
    asked = json.dumps({"patterns": patterns, "names": names})
    command = [sys.executable, "-I", "-c", _CHILD]
    try:
        done = subprocess.run(
            command, input=asked.encode(), capture_output=True, timeout=seconds, check=True
        )
    except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as ended:
        lines = (ended.stdout or b"").count(b"\n")
        raise SlowPattern(patterns[min(lines, len(patterns) - 1)].given) from None
    found = map(json.loads, done.stdout.splitlines())
    return dict(zip(patterns, found, strict=True))


def _matches(pattern: Pattern, names: Iterable[str]) -> dict[str, str | None]:
    compiled = re.compile(pattern.rule)
    match = compiled.fullmatch if pattern.complete else compiled.match
    tried = ((name, match(name)) for name in names)
    return {name: found[1 if compiled.groups else 0] for name, found in tried if found}
