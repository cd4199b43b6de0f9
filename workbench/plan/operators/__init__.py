"""Operators of a model as pure data: a graph of them, and the strategies that a plan names."""
