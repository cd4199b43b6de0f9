"""Context parallelism: one sequence over several ranks, by ring attention or by all-to-all over
heads.
"""
