"""The parts of `tests.gpu.check`, a module each: `CHECKS` in order of value."""
