"""Data parallelism: every rank the same weights, another part of the batch."""
