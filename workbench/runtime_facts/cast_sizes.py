"""How much is cast to another dtype at once: what bounds the temporaries of accumulating and
stepping.
"""

GRADIENT_CAST_NUMEL = 2**22
"""Elements of a 16-bit gradient that are upcast at once when they are added to an fp32 total."""

DROPOUT_CHUNK_NUMEL = 2**22
"""Elements whose dropout mask is drawn at a time: temporaries do not grow with the batch."""

OPTIMIZER_CAST_BYTES = 64 * 2**20
"""Bytes of the pieces in which the optimizer casts what is stored in another dtype than it steps
in.
"""

CPU_FUSED_CAST_BYTES = 2**20
"""The same for the fused optimizer on a CPU: what has been cast is stepped while it is in the
cache.
"""

HOST_CAST_BYTES = 2**24
"""The same for an optimizer in host memory, which all cores of a rank step: of smaller pieces most
of the time would go to starting threads.
"""
