"""Hugging Face folders of weights: their files, names and FP8 blocks."""
