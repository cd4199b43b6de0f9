"""Sizes that the runtime works in and the cost model counts: constants and integer functions.

Parallel modules, kernels and the engine import them to run; the cost model imports them to say
what that takes. Nothing here needs torch.
"""
