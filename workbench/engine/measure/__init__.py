"""Measurement of training: memory, collectives, timelines, telemetry."""
