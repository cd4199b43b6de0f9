"""Checks on real GPUs: `python -m tests.gpu.check`, which `--dry` runs on CPU tensors."""
