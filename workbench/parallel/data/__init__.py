"""Data parallelism and ZeRO-1/2/3 (FSDP): replicas of the weights, each with its part of the
batch.
"""
