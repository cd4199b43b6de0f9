"""Calibration: measured rates of GEMMs, memory, attention, operators and collectives."""
