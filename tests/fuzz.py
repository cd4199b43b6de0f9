"""How many inputs a property-based test draws."""

import os


def examples(usual: int) -> int:
    """`usual`, times the environment's `FUZZ_FACTOR`, which `make sweep` sets."""
    return usual * int(os.environ.get("FUZZ_FACTOR", "1"))
