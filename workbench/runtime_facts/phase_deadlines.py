"""How much longer than a collective a phase of a run may take."""

SLOW_FACTOR = 10.0
"""Building, compiling, evaluating, checkpoints and the first step, in which a GPU's kernels are
compiled, may take this many times `telemetry.timeout_seconds`; any other step this many times the
slowest so far.
"""
