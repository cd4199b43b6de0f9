"""Pictures of charts, drawn in one child process for all of them: a crash loses one picture
only.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

DRAW_TIMEOUT_SECONDS = 60.0
"""A picture takes hundredths of a second, the first about one; a loaded machine is slower."""
VEGA_LITE = "6.4"
"""Version that draws snapshots and, bundled, the live boards."""
DRAW_COMMAND = [sys.executable, "-P", str(Path(__file__).with_name("drawing_child.py"))]
ADDRESS_SPACE_LIMIT = (
    "V8, which draws, cannot live under a limit on address space (`ulimit -v`); `ulimit -v "
    "unlimited` lifts it"
)


class PictureError(RuntimeError):
    """A picture could not be drawn; the message says why."""


class _Child:
    """The drawing process: started with the first picture, ended with its caller, whose end closes
    its input.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Leave the child to whoever started it, as a fork does."""
        self.lock = threading.Lock()
        self.process: subprocess.Popen[bytes] | None = None
        self.broken: str | None = None
        """Why none can draw here, once one has died of its first picture."""

    def draw(self, spec: dict[str, Any]) -> str:
        """The SVG of one declaration. Raises `PictureError`."""
        request = json.dumps({"spec": spec, "version": VEGA_LITE}).encode() + b"\n"
        with self.lock:
            if self.broken:
                raise PictureError(self.broken)
            fresh = self.process is None
            try:
                line = self._answer(request)
            except PictureError as error:
                self.broken = str(error) if fresh else None
                raise
        answer = json.loads(line)
        if "svg" not in answer:
            raise PictureError(answer["error"])
        return str(answer["svg"])

    def _answer(self, request: bytes) -> bytes:
        """The line that answers one. Raises `PictureError` where the child dies of it, or is
        late.
        """
        process = self.process = self.process or _started()
        late = threading.Timer(DRAW_TIMEOUT_SECONDS, process.kill)
        late.start()
        try:
            assert process.stdin and process.stdout
            process.stdin.write(request)
            process.stdin.flush()
            if line := process.stdout.readline():
                return line
        except BrokenPipeError:
            pass
        finally:
            in_time = late.is_alive()
            late.cancel()
        self.close()
        why = (
            _ending(process.returncode)
            if in_time
            else f"gave no answer for {DRAW_TIMEOUT_SECONDS:.0f} s"
        )
        raise PictureError(f"the process that draws {why}")

    def close(self) -> None:
        """End the child."""
        process, self.process = self.process, None
        if process is not None and process.stdin and process.stdout:
            with contextlib.suppress(BrokenPipeError):  # what a dead child did not read
                process.stdin.close()
            if process.poll() is None:
                process.terminate()
            process.stdout.close()
            process.wait()


def _started() -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            DRAW_COMMAND,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError as error:
        raise PictureError(f"the process that draws cannot be started: {error.strerror}") from None


def _ending(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    return f"was ended by {signal.Signals(-code).name}: {ADDRESS_SPACE_LIMIT}"


_CHILD = _Child()
atexit.register(_CHILD.close)
os.register_at_fork(after_in_child=_CHILD.forget)


def render_svg(spec: dict[str, Any]) -> str:
    """A complete Vega-Lite declaration as SVG text. Raises `PictureError` saying why it could not
    be drawn.
    """
    return _CHILD.draw(spec)
