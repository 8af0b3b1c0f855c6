"""The HTML page, taken apart: well-formed, of itself alone, escaped, and its pictures have the numbers of the data."""

from __future__ import annotations

import builtins
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from html.parser import HTMLParser
from typing import Any

import msgspec
import pytest

from harness.errors import UsageError
from harness.museum.score import MuseumResult
from harness.report import page, pictures
from harness.report.evidence import Evidence, MapBucket, RankUlps, WrongRun
from harness.report.result import Result
from tests import reports


class Page(HTMLParser):
    """A page as tags with their attributes and as text; raises where tags do not nest."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.text: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in ("meta", "br"):
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open[-1:] != ["style"]:
            self.text.append(data)

    def classes(self, tag: str) -> Counter[str]:
        return Counter(name for found, attrs in self.tags if found == tag for name in attrs.get("class", "").split())

    @property
    def words(self) -> str:
        return " ".join(" ".join(self.text).split())


def rendered(*results: Result | MuseumResult, **fields: Any) -> tuple[str, Page]:
    text = page.render([reports.told(result, **fields) for result in results])
    return text, Page(text)


EVERY: dict[str, Result | MuseumResult] = {
    "holds": reports.HOLDS,
    "violated": reports.VIOLATED,
    "unknown": reports.UNKNOWN,
    "hostile": reports.hostile(),
    "museum": reports.museum(reports.CAUGHT, reports.MISSED, controls=(reports.ALARM, reports.CONTROL)),
    "empty museum": reports.museum(controls=()),
    "no pictures": msgspec.structs.replace(
        reports.VIOLATED, failure=msgspec.structs.replace(reports.FAILURE, evidence=None)
    ),
}


@pytest.mark.parametrize("result", EVERY.values(), ids=EVERY)
def test_a_page_is_well_formed_and_of_itself_alone(result: Result | MuseumResult) -> None:
    """No script, no link, no image, no address of anything: it works from a file, without a network."""
    text, found = rendered(result, seen=reports.FAILURE, notes=("a note",), cut="cut off")
    assert text.startswith("<!DOCTYPE html>")
    names = Counter(tag for tag, _ in found.tags)
    assert not names.keys() & {"script", "link", "img", "iframe", "object", "embed", "form", "base", "image", "use"}
    for _, attrs in found.tags:
        assert not any(name.startswith("on") for name in attrs)
        assert not attrs.keys() & {"src", "srcset", "action", "xlink:href", "data"}
        assert attrs.get("href", "#").startswith("#")
        assert "url(" not in attrs.get("style", "")
    assert not re.search(r"@import|https?:|url\((?!#)", re.search(r"<style>(.*?)</style>", text, re.S)[1])  # type: ignore[index]
    assert "default-src 'none'" in text
    assert ("html", {"lang": "en"}) in found.tags
    assert "prefers-color-scheme: dark" in text


def test_hostile_text_stays_text_and_is_cut() -> None:
    """Names that a subject chooses: they can neither end a tag nor turn the direction of what follows."""
    text, found = rendered(reports.hostile(), notes=(reports.HOSTILE,), name=reports.HOSTILE)
    assert "<script" not in text
    assert "<img" not in text
    assert not re.search("[\u202e\x00\x1b]", text)
    assert "alert('1')" in found.words  # shown, as text
    assert r"\u202e\x00\x1b[31m" in found.words
    assert "… (10,1" in found.words  # what is long is cut, and its length said
    assert len(text) < 200_000


def test_the_map_has_a_mark_for_each_run_and_says_each_in_words() -> None:
    _, found = rendered(reports.VIOLATED)
    evidence = reports.EVIDENCE.map
    assert evidence is not None
    marks = [attrs for tag, attrs in found.tags if tag == "rect" and attrs.get("class") == "wrong"]
    key = 1  # how to read it
    assert len(marks) - key == len(evidence.runs)
    assert marks[key]["x"] == "0.000%"
    assert marks[key]["width"] == "50.000%"  # two of four places
    drawn = [
        attrs["aria-label"] for tag, attrs in found.tags if tag == "svg" and "bucket" in attrs.get("aria-label", "")
    ]
    assert drawn == [
        "bucket 0: elements 0 to 3 (4); 2 wrong values; wrong on rank 0: elements 0 to 1",
        "bucket 1: elements 4 to 6 (3, padded to 4); 2 wrong values; wrong on rank 0: element 4; "
        "wrong on rank 1: 1 of padding",
    ]
    assert "3 of 7 values are wrong, and 1 in padding" in found.words
    assert "layers.0.weight" in found.words


def test_the_timeline_has_each_state_of_each_rank() -> None:
    _, found = rendered(reports.VIOLATED)
    timeline = reports.EVIDENCE.timeline
    assert timeline is not None
    cells = found.classes("td")
    wanted = Counter(state for row in timeline.rows for state in row.states)
    assert {state: cells[state] for state in wanted} == wanted
    assert "rank 0: first difference at step 0, reduce; rank 1: did not get on at step 0, norm" in found.words


def test_the_histogram_counts_every_wrong_value() -> None:
    bars = pictures.ulp_bars(reports.EVIDENCE.map.ulps if reports.EVIDENCE.map else ())
    assert [(bar.label, bar.count) for bar in bars] == [
        ("1", 1), ("6 steps between", 0), ("128 to 255", 2), ("inf or nan", 1)
    ]  # fmt: skip
    assert max(bar.share for bar in bars) == 100.0
    assert bars[2].note == "rank 0: 2"
    _, found = rendered(reports.VIOLATED)
    assert all(bar.label in found.words for bar in bars)


def test_the_first_difference_is_shown_bit_by_bit() -> None:
    """Only the sign differs: one bit is marked on each side."""
    _, found = rendered(reports.VIOLATED)
    assert [tag for tag, _ in found.tags].count("b") == 2
    assert pictures.bit_pairs("0x3f80", "0xbf80") == [
        ("0", "1"),
        *zip("011111110000000", "011111110000000", strict=True),
    ]
    for pair in (("0x3f80", "0x3f800000"), (None, "0x0"), ("nan", "0x0"), ("0xzz", "0x00"), ("0x" + "f" * 99,) * 2):
        assert pictures.bit_pairs(*pair) is None
    for said in (reports.FAILURE.replay, reports.FAILURE.message, reports.FAILURE.symptom, reports.FAILURE.scenario):
        assert said is not None
        assert said in found.words


def test_situations_are_counted_and_those_missing_come_first() -> None:
    result = msgspec.structs.replace(reports.HOLDS, verdict="unknown", reason="never reached", missing=("later-spill",))
    _, found = rendered(result)
    assert found.classes("li")["missing"] == 1
    assert "2 came up; 1 that a full campaign must reach did not" in found.words
    bars = pictures.situation_bars(result.reached, result.missing)
    assert [(bar.label, bar.count, bar.note) for bar in bars] == [
        ("later-spill", 0, "missing"), ("one-bucket", 1, ""), ("world-three", 10, "")
    ]  # fmt: skip
    assert not rendered(reports.HOLDS)[1].classes("li")["missing"]


def test_what_a_stopped_campaign_left_out_is_no_reproach() -> None:
    _, found = rendered(msgspec.structs.replace(reports.VIOLATED, missing=("later-spill",)))
    assert "must reach did not" not in found.words


def test_a_pass_says_what_was_checked() -> None:
    _, found = rendered(reports.HOLDS)
    assert "every property that was checked holds" in found.words
    assert "exact 1,200" in found.words
    assert "2 scenarios lay outside the subject's own space" in found.words
    assert "The first difference" not in found.words


def test_a_museum_has_its_score_and_every_exhibit() -> None:
    result = reports.museum(reports.CAUGHT, reports.MISSED, controls=(reports.ALARM, reports.CONTROL))
    _, found = rendered(result)
    assert "1 of 2 plants caught" in found.words
    assert "1 on 2 false alarms" in found.words
    assert [(wing.kind, wing.caught, wing.missed) for wing in pictures.wings(result)] == [("norm and clipping", 1, 1)]
    assert "1 caught, 1 missed, 0 undecided" in {attrs.get("aria-label") for _, attrs in found.tags}
    assert [(bar.label, bar.count) for bar in pictures.catch_bars(result)] == [("up to 0.25 s", 1)]
    for each in (*result.plants, *result.controls):
        assert each.id in found.words


def test_what_failed_comes_first_and_the_page_says_how_it_was_cut_off() -> None:
    _, found = rendered(reports.HOLDS, reports.UNKNOWN, reports.VIOLATED, cut="the log was cut off")
    assert [attrs["aria-label"].rpartition(" ")[2] for tag, attrs in found.tags if tag == "article"] == [
        "violated", "unknown", "holds"
    ]  # fmt: skip
    assert found.words.count("the log was cut off") == 3


def test_without_jinja_the_line_to_install_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *more: Any) -> Any:
        if name == "jinja2":
            raise ImportError(name)
        return real(name, *more)

    page.environment.cache_clear()
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(
        UsageError, match=re.escape("--html: jinja2 is not installed: pip install 'zero2-harness[report]'")
    ):
        page.render([reports.told(reports.HOLDS)])


# --- geometry ---------------------------------------------------------------------------------------------------------


def with_map(**fields: Any) -> Evidence:
    return msgspec.structs.replace(reports.EVIDENCE, map=msgspec.structs.replace(reports.EVIDENCE.map, **fields))


def rows_of(evidence: Evidence) -> list[pictures.BucketRow]:
    assert evidence.map is not None
    return pictures.bucket_rows(evidence.map, evidence.world)


def test_parameters_and_pieces_fill_their_bucket() -> None:
    first, last = rows_of(reports.EVIDENCE)
    assert [(bar.x, bar.width) for bar in first.parameters] == [(0.0, 75.0), (75.0, 25.0)]
    assert [(bar.x, bar.width, bar.label) for bar in last.pieces] == [(0.0, 50.0, "rank 0"), (50.0, 50.0, "rank 1")]
    assert last.padding is not None
    assert (last.padding.x, last.padding.width) == (75.0, 25.0)


def test_of_many_buckets_those_with_wrong_values_are_drawn() -> None:
    buckets = tuple(MapBucket(index, 4 * index, 4 * index + 4, 4) for index in range(100))
    rows = rows_of(with_map(buckets=buckets, runs=(WrongRun(1, 77, 2, 1),)))
    assert len(rows) == pictures.MOST_ROWS
    assert [row.index for row in rows if row.lanes] == [77]
    _, found = rendered(
        msgspec.structs.replace(
            reports.VIOLATED,
            failure=msgspec.structs.replace(
                reports.FAILURE, evidence=with_map(buckets=buckets, runs=(WrongRun(1, 77, 2, 1),))
            ),
        )
    )
    assert "76 more buckets not drawn" in found.words


def test_a_bucket_tells_all_its_wrong_values_though_not_every_run_is_drawn() -> None:
    buckets = (MapBucket(0, 0, 4, 4, wrong=2), MapBucket(1, 4, 8, 4, wrong=3))
    rows = rows_of(with_map(buckets=buckets, runs=(WrongRun(0, 0, 0, 2),), runs_left_out=2))
    assert [row.wrong for row in rows] == [2, 3]


def test_a_run_into_padding_names_no_element_of_the_next_bucket() -> None:
    buckets = (MapBucket(0, 0, 3, 6), MapBucket(1, 3, 7, 4))
    row, _ = rows_of(with_map(buckets=buckets, runs=(WrongRun(1, 0, 2, 3),)))
    assert [bar.title for bar in row.lanes[0].bars] == ["wrong on rank 1: element 2 and 2 of padding"]


def test_ranks_that_are_wrong_but_have_no_line_of_their_own_are_counted() -> None:
    runs = tuple(WrongRun(rank, 0, 1, 1) for rank in range(pictures.MOST_LANES + 3))
    evidence = with_map(whole=True, runs=runs)
    assert [len(row.lanes) for row in rows_of(evidence)] == [pictures.MOST_LANES, 0]
    failure = msgspec.structs.replace(reports.FAILURE, evidence=evidence)
    _, found = rendered(msgspec.structs.replace(reports.VIOLATED, failure=failure))
    assert "rank 7; 3 more ranks not drawn" in found.words


@pytest.mark.parametrize(
    "fields",
    [
        {"buckets": (MapBucket(0, 5, 2, 0), MapBucket(1, -3, -1, 4))},
        {"buckets": (MapBucket(0, 0, 10**15, 10**15),)},
        {"runs": (WrongRun(0, 99, -5, 10**12),)},
        {"ulps": (RankUlps(rank=0, bins={-5: 1, 10**9: 1}),)},
        {"buckets": (), "parameters": (), "runs": (), "values": (), "ulps": ()},
    ],
)
@pytest.mark.parametrize("world", [0, 2, 10**9])
def test_numbers_that_make_no_sense_are_no_harm(fields: Mapping[str, Any], world: int) -> None:
    """A file may say anything that has the right types."""
    evidence = msgspec.structs.replace(with_map(**fields), world=world)
    failure = msgspec.structs.replace(reports.FAILURE, evidence=evidence)
    text, _ = rendered(msgspec.structs.replace(reports.VIOLATED, failure=failure))
    assert len(text) < 200_000
