"""A deterministic world in one process: ranks that run one at a time, and whose collectives the harness computes."""
