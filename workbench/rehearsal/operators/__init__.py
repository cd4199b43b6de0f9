"""Operators of a rehearsed step: what each computes and moves."""
