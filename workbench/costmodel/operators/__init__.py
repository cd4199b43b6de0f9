"""A rank's microbatch under operator strategies, operator by operator, as the runtime runs it: what
is allocated, saved for backward and freed, every collective, and the work between them.

Other plans have closed forms. Here each module may be sharded in its own way, so that a microbatch
is run on tensors that have a shape but no entries.
"""
