"""Measuring the attached machine: what a matrix product, a byte moved, an operator and a collective
cost here.
"""
