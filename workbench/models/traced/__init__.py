"""Tracing of a user's module into operators, and running them."""
