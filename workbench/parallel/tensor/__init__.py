"""Tensor parallelism: one matrix product over several ranks (Shoeybi et al. 2019, arXiv
1909.08053).
"""
