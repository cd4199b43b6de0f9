"""The named schedules: GPipe, 1F1B, interleaved 1F1B, zero bubble, DualPipe-V."""
