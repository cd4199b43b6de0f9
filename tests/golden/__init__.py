"""What scripts may rely on: `--json` of every verb on twenty plans, exit codes, the JSON schema, a
run directory.
"""
