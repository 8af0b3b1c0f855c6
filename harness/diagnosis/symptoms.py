"""The kinds of mistakes that can be told from values."""

from __future__ import annotations

import enum


class Symptom(enum.Enum):
    """What is wrong with a value, in a phrase; where it applies, a detail follows (which part, by how many)."""

    FACTOR_WORLD = "W times too large"
    FACTOR_ONE_OVER_WORLD = "1/W of what it should be: averaged over ranks"
    FACTOR_PARTS = "too large by the number of parts"
    FACTOR_ONE_OVER_PARTS = "averaged over parts"
    PART_MISSING = "a part is missing"
    PART_TWICE = "a part is counted twice"
    RANK_MISSING = "a rank's contribution is missing"
    RANK_TWICE = "a rank's contribution is counted twice"
    EARLIER = "an earlier step's value in its place"
    EARLIER_ADDED = "an earlier step's gradients are still in it"
    UNCLIPPED = "the value from before the clip"
    OTHER_RANK = "another rank's piece"
    OTHER_BUCKET = "another bucket's values"
    SHIFTED = "shifted by k elements"
    PADDING = "padding leaked: it is not zero, or takes the place of values"
    TOWARD_ZERO = "rounded toward zero"
    BF16_BEFORE = "rounded to bf16 before the sum"
    BF16_AFTER = "rounded to bf16"
    ZERO = "zero where a value belongs"
    NONFINITE = "nan or inf swallowed"
    SIGN_OF_ZERO = "the sign of zero"
    ORDER = "only the order of the sum"
    LOCAL = "of this rank alone: not summed over ranks"
    TWICE = "counted twice"
    ROOT = "the root of what it should be"


# Whatever shows the second in every scenario shows the first as well; then the second says more.
SAYS_MORE = (
    (Symptom.PART_MISSING, Symptom.RANK_MISSING),
    (Symptom.PART_TWICE, Symptom.RANK_TWICE),
    (Symptom.PART_MISSING, Symptom.ZERO),
    (Symptom.RANK_MISSING, Symptom.ZERO),
    (Symptom.SHIFTED, Symptom.OTHER_RANK),
    (Symptom.SHIFTED, Symptom.OTHER_BUCKET),
    *((other, Symptom.PADDING) for other in Symptom if other is not Symptom.PADDING),
)


def named_by(text: str) -> Symptom:
    """The symptom behind its phrase, which a detail may follow."""
    return next(symptom for symptom in Symptom if text == symptom.value or text.startswith(f"{symptom.value} ("))
