"""The declaration: what a plan is, what its names mean, whether it is legal."""
