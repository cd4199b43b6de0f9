"""Losses of pairs of answers."""
