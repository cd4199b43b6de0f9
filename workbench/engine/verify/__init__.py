"""Numerical equivalence: to a single device, and between data-parallel replicas."""
