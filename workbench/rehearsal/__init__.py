"""The real engine on fake tensors and a fake process group: memory and traffic of any world, on one
machine.
"""
