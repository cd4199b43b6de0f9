"""Optimizer state and gradients in host memory (ZeRO-Offload), and how they get there and back."""
