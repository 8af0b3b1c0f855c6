"""The harness under load: scenarios with faults among them, every verdict checked, nothing left behind. No torch."""
