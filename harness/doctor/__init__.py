"""The `doctor` verb: what this machine promises of what the harness relies on, measured each time."""
