"""Search of one strategy for each operator: exact, recursive, or from those that the user pins."""
