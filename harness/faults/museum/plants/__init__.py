"""The planted bugs: one class each, by kind. Ranks import these modules, the parent never does.

A new one: the class here, as a variant of ``zero2core.ZeroMaster`` (``own=True`` on its label: it is judged by all that
``zero2`` promises) or of :class:`harness.faults.museum.plain.PlainZero`; its label in the module of the same name in
``labels``, with the smallest scenario that you know to show it; then ``pytest tests/ranks/test_museum.py -k ITS-ID``
and ``python -m harness museum --plant ITS-ID``.
"""
