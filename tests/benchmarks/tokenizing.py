"""How fast text is tokenized beside `tokenizers` alone, and in how much memory.

`python -m tests.benchmarks.tokenizing [--megabytes 60] [--rounds 3] [--large 1024] [--json]`: rows
of JSONL made of the standard library's sources, a BPE of 8,192 ids trained on them. In turn: the
text already decoded in memory, through `encode_batch_fast` in batches with as many threads as there
are cores, its ids thrown away; and the file through the cache's encoder, with as many processes, to
tokens on disk. `--large` then encodes so many megabytes in one process of its own, and reads the
highest sum of memory (PSS) of it and its children. Leave the machine alone meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import psutil
from tokenizers import Tokenizer

from workbench.corpora.encode_pool import usable_cores
from workbench.corpora.tokenized_corpus import load_corpus
from workbench.corpora.trained_bpe import sample_texts, train_bpe
from workbench.plan.corpus_files import files, source_files
from workbench.plan.schema import Corpus

VOCAB = 8192
ROW_BYTES = 4096
BATCH_ROWS = 1024
POLL_SECONDS = 0.2


def rows() -> Iterator[str]:
    """Rows of about `ROW_BYTES`, again and again."""
    texts = [path.read_text(errors="replace") for path in files("stdlib")]
    while True:
        for text in texts:
            for at in range(0, len(text), ROW_BYTES):
                yield text[at : at + ROW_BYTES]


def write_rows(path: Path, size: int) -> None:
    """A JSONL file of about `size` bytes."""
    with path.open("wb") as file:
        for i, text in enumerate(rows()):
            file.write(orjson.dumps({"id": i, "text": text}) + b"\n")
            if file.tell() >= size:
                return


class Spent(NamedTuple):
    """Seconds by the clock, and of all cores, of this process and the children that ended."""

    wall: float
    cpu: float


def _now() -> Spent:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return Spent(time.perf_counter(), sum(one.ru_utime + one.ru_stime for one in used))


def _since(began: Spent) -> Spent:
    now = _now()
    return Spent(now.wall - began.wall, now.cpu - began.cpu)


def alone(tokenizer: Tokenizer, texts: list[str]) -> Spent:
    """Seconds of `tokenizers` alone."""
    began = _now()
    for at in range(0, len(texts), BATCH_ROWS):
        tokenizer.encode_batch_fast(texts[at : at + BATCH_ROWS], add_special_tokens=False)
    return _since(began)


def ours(path: Path, tokenizer: Path, processes: int | None) -> Spent:
    """Seconds from the file to tokens on disk, which are not in the cache."""
    corpus = Corpus(source=str(path), tokenizer=str(tokenizer))
    with tempfile.TemporaryDirectory() as folder:
        began = _now()
        load_corpus(corpus, VOCAB, folder=Path(folder), processes=processes)
        return _since(began)


def peak_memory(path: Path, tokenizer: Path) -> dict[str, float]:
    """Encode `path` in a process of its own; MB of it and its children together."""
    code = (
        "import sys; from pathlib import Path; from tests.benchmarks.tokenizing import ours\n"
        "print(ours(Path(sys.argv[1]), Path(sys.argv[2]), None).wall)"
    )
    words = [sys.executable, "-c", code, str(path), str(tokenizer)]
    child = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    samples: list[float] = []

    def watch() -> None:
        while child.poll() is None:
            samples.append(_memory(child.pid))
            time.sleep(POLL_SECONDS)

    watcher = threading.Thread(target=watch)
    watcher.start()
    seconds = float(child.communicate()[0])
    watcher.join()
    middle = len(samples) // 2
    return {
        "seconds": seconds,
        "peak_MB": max(samples),
        "first_half_MB": max(samples[:middle]),
        "second_half_MB": max(samples[middle:]),
    }


def _memory(pid: int) -> float:
    total = 0
    try:
        for process in (parent := psutil.Process(pid), *parent.children()):
            total += process.memory_full_info().pss
    except psutil.Error:
        pass
    return total / 1e6


def measure(megabytes: int, rounds: int, large: int) -> dict[str, Any]:
    """Both, in turn, and the memory of a large file."""
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    os.environ.setdefault("RAYON_NUM_THREADS", str(usable_cores()))
    with tempfile.TemporaryDirectory() as folder:
        path, tokenizer = Path(folder, "a.jsonl"), Path(folder, "tokenizer.json")
        write_rows(path, megabytes * 10**6)
        train_bpe(sample_texts(source_files(Corpus(source="stdlib"))), VOCAB).save(str(tokenizer))
        lines = path.read_bytes().splitlines()
        texts = [orjson.loads(line)["text"] for line in lines]
        size = sum(len(text.encode()) for text in texts)
        loaded = Tokenizer.from_file(str(tokenizer))
        pairs = [
            (alone(loaded, texts), ours(path, tokenizer, usable_cores())) for _ in range(rounds)
        ]
        found: dict[str, Any] = {
            "cores": usable_cores(),
            "text_MB": size / 1e6,
            "tokenizers_MB_per_second": size / 1e6 / statistics.median(a.wall for a, _ in pairs),
            "ours_MB_per_second": size / 1e6 / statistics.median(b.wall for _, b in pairs),
            "ratios": [a.wall / b.wall for a, b in pairs],
            "ratio": statistics.median(a.wall / b.wall for a, b in pairs),
            "ratio_of_cpu_seconds": statistics.median(a.cpu / b.cpu for a, b in pairs),
        }
        if large:
            write_rows(path, large * 10**6)
            found["large"] = {"MB": large, **peak_memory(path, tokenizer)}
    return found


def main() -> None:
    """Measure and print."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--megabytes", type=int, default=60)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--large", type=int, default=0)
    options.add_argument("--json", action="store_true")
    asked = options.parse_args()
    found = measure(asked.megabytes, asked.rounds, asked.large)
    if asked.json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        print(f"{name}: {value:.3g}" if isinstance(value, float) else f"{name}: {value}")


if __name__ == "__main__":
    main()
