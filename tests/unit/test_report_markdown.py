"""The job summary: what failed first, nothing in it that a name could break, never more than is shown."""

from __future__ import annotations

import re

import msgspec
import pytest

from harness.report import markdown
from tests import reports


def test_the_verdict_comes_first_and_what_failed_before_what_passed() -> None:
    text = markdown.render([reports.told(reports.HOLDS, "a.jsonl"), reports.told(reports.VIOLATED, "b.jsonl")])
    lines = text.splitlines()
    assert lines[0] == "## ❌ zero2-harness: violated"
    rows = [line for line in lines if line.startswith(("| ❌", "| ✅"))]
    assert [row.split(" | ")[-1] for row in rows] == ["b.jsonl |", "a.jsonl |"]
    assert text.index("### ❌ violated: verify of ./mine.py:Zero2") < text.index("<summary>✅ holds: verify of zero2")
    assert "gradient is violated first at step 0, stage reduce, rank 0, bucket 0, parameter layers.0.weight" in text
    assert "```\npython -m harness replay cases/c.json --subject zero2\n```" in text
    assert "| expected | 1.5 (bits 0x3fc00000) |" in text


def test_one_result_needs_no_table_and_a_pass_is_folded_away() -> None:
    text = markdown.render([reports.told(reports.HOLDS)])
    assert text.startswith("## ✅ zero2-harness: holds\n")
    assert "| verdict |" not in text
    assert text.count("<details>") == text.count("</details>") == 2


@pytest.mark.parametrize(
    "result", [reports.VIOLATED, reports.hostile(), reports.museum(reports.CAUGHT, reports.MISSED)]
)
def test_tables_and_fences_hold_whatever_names_say(result: object) -> None:
    """No cell ends early, no fence is ended by its own text, no tag is one."""
    text = markdown.render([reports.told(result, reports.HOSTILE), reports.told(reports.HOLDS)])  # type: ignore[arg-type]
    assert not re.search("[\u202e\x00\x1b]", text)
    outside, fence = [], None
    for line in text.splitlines():
        if fence is None and (opened := re.match("(`{3,})[a-z]*$", line)):
            fence = opened[1]
        elif fence is not None and line == fence:
            fence = None
        elif fence is None:
            outside.append(line)
    assert fence is None
    assert {tag.rstrip(">") for tag in re.findall("</?[a-z]+", "\n".join(outside))} == {
        "<details", "</details", "<summary", "</summary"
    }  # fmt: skip
    for row in [line for line in outside if line.startswith("| ")]:
        assert row.count(" | ") in (1, 2, 5)
        assert len(row) < 2500


def test_what_ends_a_fence_is_in_a_longer_one() -> None:
    assert markdown.fenced("a\n````\nb").startswith("`````\n")


def test_what_markdown_would_read_is_escaped() -> None:
    assert markdown.escaped("a|b*c_d`e<f>&[g](h)@i\n#j$") == (
        r"a&#124;b\*c\_d\`e&lt;f&gt;&amp;\[g\](h)&#64;i \#j\$"
    )  # fmt: skip


def test_a_summary_is_never_larger_than_is_shown() -> None:
    """GitHub shows nothing of a summary above 1 MiB: what failed is kept, and what is left out is counted."""
    large = msgspec.structs.replace(reports.FAILURE, output="é" * 10**6, test="x" * 10**6, message="m" * 10**6)
    results = [reports.told(msgspec.structs.replace(reports.VIOLATED, failure=large)) for _ in range(10)]
    text = markdown.render([*[reports.told(reports.HOLDS)] * 300, *results])
    assert len(text.encode()) <= markdown.MOST_BYTES
    sections = text.count("### ❌")
    assert 1 <= sections < 10
    assert f"_{310 - sections} results left out: a summary has room for 700,000 bytes." in text
    assert "_110 more results_" in text  # of the table


def test_what_does_not_print_takes_no_more_room_than_other_text() -> None:
    """Spelled out, such a character is up to ten times as long: what failed is told all the same."""
    strange = "\U000e0001" * 60_000
    failure = msgspec.structs.replace(reports.FAILURE, output=strange, test=strange)
    violated = reports.told(msgspec.structs.replace(reports.VIOLATED, failure=failure))
    alarms = tuple(msgspec.structs.replace(reports.ALARM, failure=failure) for _ in range(3))
    text = markdown.render([violated, reports.told(reports.museum(reports.CAUGHT, controls=alarms))])
    assert len(text.encode()) <= markdown.MOST_BYTES
    assert text.count("### ❌") == 2
    assert "left out: a summary" not in text


def test_a_museum_names_what_is_not_as_it_must_be() -> None:
    text = markdown.render([reports.told(reports.museum(reports.CAUGHT, reports.MISSED, controls=(reports.ALARM,)))])
    assert "1 of 2 plants caught, 1 false alarm on 1 control" in text
    assert "- never-seen: NOT CAUGHT" in text
    assert "- plain-zero (control): FALSE ALARM" in text
    assert "- max-of-norms" not in text


def test_what_was_cut_off_is_said() -> None:
    assert "> the log was cut off" in markdown.render([reports.told(reports.UNKNOWN, cut="the log was cut off")])
