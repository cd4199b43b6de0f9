"""Operator strategies: each module split as its own strategy says, redistributed where layouts
differ.
"""
