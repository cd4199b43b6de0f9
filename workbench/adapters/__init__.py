"""Low-rank adapters beside frozen weights (LoRA), and their files."""
