"""Context parallelism: the tokens of a sequence sharded over ranks, with ring attention or
Ulysses.
"""
