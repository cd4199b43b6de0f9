"""Rules of task sections, and their words."""
