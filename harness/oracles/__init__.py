"""Oracles: the reference and the rules by which equality is decided. Nothing is imported here (torch is slow)."""
