"""The bug museum: real sharding bugs planted in small ZeRO-2 classes, and right variants that must pass.

``plants`` and ``controls`` hold the classes, which ranks import; ``labels`` say of each what a verifier must make of
it, as plain data; ``catalogue`` is all of them. :mod:`harness.museum` runs them.
"""
