"""Low-rank adapters: PEFT's format, and merging."""
