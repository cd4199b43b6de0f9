"""Distributed checkpoints: format, integrity, reading, writing, Hugging Face names."""
