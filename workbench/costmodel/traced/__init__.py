"""A user's traced module on shapes: what each operator allocates, keeps for backward and computes."""
