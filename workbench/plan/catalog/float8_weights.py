"""A `quantization_config` of weights in fp8 with a scale for each block of rows and columns."""

from __future__ import annotations

import json
from typing import Any

from workbench.plan.catalog.huggingface_keys import MOST, Reading

KEY = "quantization_config"


def float8_blocks(config: Any) -> tuple[int, int] | None:
    """Rows and columns of a block; None where a configuration says no such weights.

    DeepSeek-V3's: `{"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}`.
    """
    section = config.get(KEY) if isinstance(config, dict) else None
    if not isinstance(section, dict) or section.get("quant_method") != "fp8":
        return None
    size = section.get("weight_block_size")
    if section.get("fmt", "e4m3") != "e4m3" or not isinstance(size, list) or len(size) != 2:
        return None
    rows, columns = size
    sound = all(type(n) is int and 1 <= n <= MOST for n in size)
    return (rows, columns) if sound else None


def note_quantization(reading: Reading) -> None:
    """Tell what becomes of weights that are not in the precision of a plan."""
    section = reading.config.get(KEY)
    if section is None:
        return
    if float8_blocks(dict(reading.config)):
        reading.get(KEY)
        reading.leave_out(KEY, "weights in fp8 are dequantised as they are read")
        return
    text = json.dumps(section, ensure_ascii=False, default=str)
    reading.lacks(KEY, f"{KEY} {text if len(text) <= 60 else text[:57] + '...'}")
