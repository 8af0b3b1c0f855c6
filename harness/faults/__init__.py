"""Faults on purpose: what a scenario asks its ranks to do wrong, and what each must turn into."""
