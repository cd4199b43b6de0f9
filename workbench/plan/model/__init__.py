"""The model that a plan trains: its shape, parameters, heads and code."""
