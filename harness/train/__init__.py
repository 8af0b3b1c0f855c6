"""The `train` verb: a small language model on real text, sharded and unsharded side by side, compared at every step."""
