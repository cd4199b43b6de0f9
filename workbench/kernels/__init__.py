"""Fused kernels for the models' seams, each with its plain reference."""
