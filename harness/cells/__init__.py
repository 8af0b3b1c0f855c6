"""Every cell of strategy x reduction x accumulation x clipping, held against one process: ``harness strategies``."""
