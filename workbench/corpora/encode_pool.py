"""Encodes pieces in child processes, in order and with a bounded number under way.

A child reads one JSON line a piece, and answers each with a JSON line and the raw tokens and
lengths.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from queue import SimpleQueue
from typing import Any, BinaryIO

import numpy as np

from workbench.corpora.bounded_child import BoundedChild, refusal
from workbench.corpora.encoder import Encoded, Encoder, Encoding, encoding_of, sent_tokenizer
from workbench.corpora.pieces import Piece

ALONE_BYTES = 2**23
"""Bytes of text that one process encodes: starting others takes longer."""
AHEAD = 3
"""Pieces under way for each child."""


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
        total: Bytes of all of them; few are encoded by one process, which is this one where
            nothing of a stranger works on them.
        processes: Children, at least 1; by default one a usable core.

    Raises:
        ValueError: A piece cannot be read or encoded; names the file and the row.
        StrangerError: The tokenizer or template takes more time or memory than it may.
        ChildError: A child ended.
    """
    if processes is None and total <= ALONE_BYTES:
        if encoding.own:
            encoder = Encoder(encoding)
            yield from map(encoder.encode, pieces)
            return
        processes = 1
    tokenizer = sent_tokenizer(encoding)
    children = [_Child(encoding, tokenizer) for _ in range(processes or usable_cores())]
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


class _Child(BoundedChild):
    def __init__(self, encoding: Encoding, tokenizer: str | None) -> None:
        super().__init__(__name__)
        self.encoding: Encoding | None = encoding
        self.how, self.tokenizer = encoding, tokenizer

    def encode(self, piece: Piece) -> Encoded:
        if self.encoding is not None:
            self.ask({"encoding": asdict(self.encoding), "tokenizer": self.tokenizer})
            self.encoding = None
        answer = self.ask(asdict(piece))
        tokens = self._array(answer["tokens"], self.how.dtype)
        lengths = self._array(answer["lengths"], np.dtype(np.int32))
        return Encoded(tokens, lengths, answer["skipped"], piece.ends, piece.size)

    def _array(self, count: int, dtype: np.dtype) -> np.ndarray:
        return np.frombuffer(self.read(count * dtype.itemsize), dtype)


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Encode pieces until `requests` ends: the child's side."""
    encoder = None
    for line in requests:
        request, arrays = json.loads(line), list[np.ndarray]()
        try:
            if encoder is None:
                encoder = Encoder(encoding_of(request["encoding"]), request["tokenizer"])
                answer: dict[str, Any] = {}
            else:
                done = encoder.encode(Piece(**request))
                arrays = [done.tokens, done.lengths]
                answer = {"tokens": len(done.tokens), "lengths": len(done.lengths)}
                answer["skipped"] = done.skipped
        except BaseException as error:
            answer = refusal(error)
        answers.write(json.dumps(answer).encode() + b"\n")
        for array in arrays:
            answers.write(array.tobytes())
        answers.flush()
