"""Attention of one device: torch's kernels, and our own over tiles of queries and keys."""
