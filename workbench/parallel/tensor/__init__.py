"""Tensor parallelism: each linear layer sharded over several ranks (Megatron-LM, arXiv
1909.08053).
"""
