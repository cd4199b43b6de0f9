"""The engine: training session, loop and worker of a rank."""
