"""A child process for what strangers wrote, chat templates and tokenizers, which may not end or may
fill memory: each piece of its work has so much CPU time and memory, in relation to its text.

It runs the `serve` of a module on its standard input and output, and ends when its input does, so
also when its parent is killed.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

from workbench.errors import ChildError
from workbench.untrusted_text import brief

SECONDS = 1.0
"""CPU time of one piece of work, beside that for its bytes; a template takes milliseconds."""
BYTES_PER_SECOND = 50_000
"""Rate of text; tokenizers take a megabyte a second and more."""
MEMORY_BYTES = 2**29
"""Memory of one piece of work, beside that for its bytes."""
MEMORY_PER_BYTE = 512
"""Memory for a byte of text; an encoding with offsets takes about 200."""
TEMPLATE, TOKENIZER = signal.ITIMER_PROF, signal.ITIMER_VIRTUAL
"""Clocks, of which each ends a process by a signal of its own."""
OVERDUE: dict[int, str] = {signal.SIGPROF: "chat template", signal.SIGVTALRM: "tokenizer"}
ONE_THREAD = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
_PAGE = resource.getpagesize()
_bounded = False
_STDERR = Lock()
MOST_WORDS = 300
"""Characters of what a library says."""
MEMORY = "takes more memory than its text may"


@contextmanager
def bounded(clock: int, nbytes: int) -> Iterator[None]:
    """A context of one piece of work: the kernel ends a process that exceeds its time, whatever
    library it is in, and memory beyond the bound is refused. Outside a `BoundedChild` it is free.

    Args:
        clock: `TEMPLATE` or `TOKENIZER`.
        nbytes: Of the text that is worked on.
    """
    if not _bounded:
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * _PAGE
    limit = used + MEMORY_BYTES + MEMORY_PER_BYTE * nbytes
    limit = limit if before[0] == resource.RLIM_INFINITY else min(limit, before[0])
    resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
    signal.setitimer(clock, SECONDS + nbytes / BYTES_PER_SECOND)
    try:
        yield
    finally:
        signal.setitimer(clock, 0)
        resource.setrlimit(resource.RLIMIT_AS, before)


class StrangerError(ValueError):
    """A template or tokenizer that ended its process; says which, begins with a verb."""

    def __init__(self, what: str, words: str) -> None:
        super().__init__(words)
        self.what = what


@contextmanager
def tokenizer_errors() -> Iterator[None]:
    """A context in which whatever the library `tokenizers` raises is a `StrangerError`, its panics
    included, which are no `Exception` and of which it writes a trace: that is not shown.
    """
    try:
        with _silent():
            yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise StrangerError("tokenizer", f"fails: {brief(str(error), MOST_WORDS)}") from None


@contextmanager
def _silent() -> Iterator[None]:
    """A context in which libraries write to no standard error; one thread at a time is in it."""
    with _STDERR, open(os.devnull, "w") as nowhere:
        kept = os.dup(2)
        os.dup2(nowhere.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)


class BoundedChild:
    """A child process that answers lines of JSON.

    Args:
        module: Whose `serve(requests, answers)` it runs.
    """

    def __init__(self, module: str) -> None:
        self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - as the child
        path = os.pathsep.join(filter(None, sys.path))
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", f"from {__name__} import main; main()", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, **ONE_THREAD, "PYTHONPATH": path},
        )
        assert self._process.stdin
        assert self._process.stdout
        self._requests, self._answers = self._process.stdin, self._process.stdout

    def __enter__(self) -> BoundedChild:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """The answer to a request.

        Raises:
            ValueError: The child refuses; its words.
            StrangerError: What it works on took more time or memory than it may.
            ChildError: It ended otherwise.
        """
        try:
            self._requests.write(json.dumps(request).encode() + b"\n")
            self._requests.flush()
        except BrokenPipeError:
            raise self._ended() from None
        line = self._answers.readline()
        if not line.endswith(b"\n"):
            raise self._ended()
        answer: dict[str, Any] = json.loads(line)
        if "stranger" in answer:
            raise StrangerError(answer["stranger"], answer["error"])
        if "error" in answer:
            raise ValueError(answer["error"])
        return answer

    def read(self, nbytes: int) -> bytes:
        """Bytes that follow an answer."""
        content = self._answers.read(nbytes)
        if len(content) < nbytes:
            raise self._ended()
        return content

    def end(self) -> None:
        """End the child, whatever it is doing."""
        self._process.kill()
        self._process.wait()
        self._requests.close()
        self._answers.close()
        self._errors.close()

    def _ended(self) -> StrangerError | ChildError:
        code = self._process.wait()
        if what := OVERDUE.get(-code):
            return StrangerError(what, f"is not done in {SECONDS:g} s of CPU time")
        if -code in (signal.SIGABRT, signal.SIGSEGV):
            return StrangerError("tokenizer", f"{MEMORY}, or is damaged")
        self._errors.seek(0)
        said = (self._errors.read().strip().splitlines() or ["it said no reason"])[-1]
        return ChildError(f"a process that encodes text ended with exit code {code}: {said}")


def refusal(error: BaseException) -> dict[str, str]:
    """The answer that says why a request is refused; raises what is no reason to refuse one."""
    if isinstance(error, MemoryError):
        error = StrangerError("tokenizer", MEMORY)
    if isinstance(error, StrangerError):
        return {"stranger": error.what, "error": str(error)}
    if isinstance(error, ValueError | OSError):
        return {"error": str(error)}
    raise error


def main() -> None:
    """Serve requests until the input ends, within bounds."""
    global _bounded
    # Ctrl-C reaches the whole group of processes; the parent ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A parent that was killed reads no more: end without a word.
    for ending in (signal.SIGPIPE, *OVERDUE):
        signal.signal(ending, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    serve = importlib.import_module(sys.argv[1]).serve
    _bounded = True
    serve(sys.stdin.buffer, sys.stdout.buffer)
