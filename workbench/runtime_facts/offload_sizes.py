"""Sizes of what offload to host memory keeps beside the model states."""

STAGING_BYTES = 32 * 2**20
"""Bytes of each of the two pinned buffers through which parameters are copied to the device: one
is filled while the other is on its way.
"""
