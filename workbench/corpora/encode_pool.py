"""Encodes pieces in child processes, in order and with a bounded number under way.

A child (`python -m workbench.corpora.encode_pool`) reads one JSON line a piece, and answers each
with a JSON line and the raw tokens and lengths. It ends when its standard input does, so also when
its parent is killed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from queue import SimpleQueue
from typing import Any, BinaryIO

import numpy as np

from workbench.corpora.encoder import Encoded, Encoder, Encoding, encoding_of
from workbench.corpora.pieces import Piece
from workbench.errors import ChildError

ALONE_BYTES = 2**23
"""Bytes of text that this process encodes itself: starting others takes longer."""
AHEAD = 3
"""Pieces under way for each child."""
ONE_THREAD = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def encode_all(
    encoding: Encoding, pieces: Iterable[Piece], total: int, processes: int | None = None
) -> Iterator[Encoded]:
    """Encode pieces, in their order.

    Args:
        encoding: How.
        pieces: What; read as they are needed.
        total: Bytes of all of them; few are encoded by this process.
        processes: Children, at least 1; by default one a usable core.

    Raises:
        ValueError: A piece cannot be read or encoded; names the file and the row.
        ChildError: A child ended.
    """
    if processes is None and total <= ALONE_BYTES:
        encoder = Encoder(encoding)
        yield from map(encoder.encode, pieces)
        return
    children = [_Child(encoding) for _ in range(processes or usable_cores())]
    free: SimpleQueue[_Child] = SimpleQueue()
    for child in children:
        free.put(child)

    def encode(piece: Piece) -> Encoded:
        child = free.get()
        try:
            return child.encode(piece)
        finally:
            free.put(child)

    under_way: deque[Future[Encoded]] = deque()
    with ThreadPoolExecutor(len(children), "encode") as threads:
        try:
            for piece in pieces:
                under_way.append(threads.submit(encode, piece))
                if len(under_way) >= AHEAD * len(children):
                    yield under_way.popleft().result()
            while under_way:
                yield under_way.popleft().result()
        finally:
            for future in under_way:
                future.cancel()
            for child in children:
                child.end()


class _Child:
    def __init__(self, encoding: Encoding) -> None:
        self.encoding = encoding
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "workbench.corpora.encode_pool"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **ONE_THREAD, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        assert self.process.stdin
        assert self.process.stdout
        self.requests, self.answers = self.process.stdin, self.process.stdout
        self._send(asdict(encoding))

    def encode(self, piece: Piece) -> Encoded:
        self._send(asdict(piece))
        line = self.answers.readline()
        if not line:
            raise self._ended()
        answer = json.loads(line)
        if "error" in answer:
            raise ValueError(answer["error"])
        tokens = self._array(answer["tokens"], self.encoding.dtype)
        lengths = self._array(answer["lengths"], np.dtype(np.int32))
        return Encoded(tokens, lengths, answer["skipped"], piece.ends, piece.size)

    def end(self) -> None:
        """End the child, whatever it is encoding."""
        self.process.kill()
        self.process.wait()
        self.requests.close()
        self.answers.close()

    def _send(self, what: dict[str, Any]) -> None:
        try:
            self.requests.write(json.dumps(what).encode() + b"\n")
            self.requests.flush()
        except BrokenPipeError:
            raise self._ended() from None

    def _array(self, count: int, dtype: np.dtype) -> np.ndarray:
        content = self.answers.read(count * dtype.itemsize)
        if len(content) < count * dtype.itemsize:
            raise self._ended()
        return np.frombuffer(content, dtype)

    def _ended(self) -> ChildError:
        code = self.process.wait()
        return ChildError(f"a process that encodes text ended with exit code {code}")


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Encode pieces until `requests` ends: the child's side."""
    encoder = Encoder(encoding_of(json.loads(requests.readline())))
    for line in requests:
        try:
            done = encoder.encode(Piece(**json.loads(line)))
        except (ValueError, OSError) as error:
            answers.write(json.dumps({"error": str(error)}).encode() + b"\n")
        else:
            head = {"tokens": len(done.tokens), "lengths": len(done.lengths)}
            answers.write(json.dumps({**head, "skipped": done.skipped}).encode() + b"\n")
            answers.write(done.tokens.tobytes())
            answers.write(done.lengths.tobytes())
        answers.flush()


if __name__ == "__main__":
    # Ctrl-C reaches the whole group of processes; the parent ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A parent that was killed reads no more: end without a word.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    serve(sys.stdin.buffer, sys.stdout.buffer)
