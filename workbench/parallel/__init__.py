"""Parallel strategies: a plain model sharded over a mesh, one folder an axis, one layout a
tensor.
"""
