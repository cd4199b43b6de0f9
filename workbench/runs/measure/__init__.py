"""What is measured of this machine in child processes: its rates, and the layers of a model."""
