"""Operator strategies of a plan: what makes them fit its memory, and the plan that has them."""
