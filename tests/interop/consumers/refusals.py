"""Refusals of a framework, as a driver prints them in an interpreter of its own."""

import json
import sys
from collections.abc import Callable
from typing import Any


def print_refusals(check: Callable[[dict[str, Any]], None]) -> None:
    """Print a JSON object of name -> refusal, "" where `check` accepts, of the JSON list of jobs on
    stdin.
    """
    found = {}
    for job in json.load(sys.stdin):
        try:
            check(job)
            found[job["name"]] = ""
        except (Exception, SystemExit) as error:
            found[job["name"]] = f"{type(error).__name__}: {error}"
    print(json.dumps(found))
