"""Operator strategies: each module sharded as its own strategy says, redistributed in between."""
