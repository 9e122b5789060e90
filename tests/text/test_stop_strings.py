"""Stop strings against the obvious method: look at the whole text after every character."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from serve.text.stop_strings import StopString, StopStrings

TEXT = st.text("ab.", max_size=24)
STOPS = st.lists(st.text("ab.", min_size=1, max_size=5), min_size=1, max_size=4)


def by_the_obvious_method(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The first end of any stop string decides; of those that end there, the longest."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def watch(*stops: str, include: bool = False) -> StopStrings:
    return StopStrings([StopString(stop) for stop in stops], include=include)


def scan_in_pieces(pieces: list[str], stops: list[str], include: bool) -> tuple[str, str | None]:
    scanner = watch(*stops, include=include)
    out = ""
    for piece in pieces:
        scan = scanner.scan(piece)
        out += scan.text
        if scan.stop is not None:
            return out, scan.stop
    return out + scanner.flush(), None


@given(st.lists(TEXT, max_size=8), STOPS, st.booleans())
def test_pieces_end_where_the_whole_text_does(
    pieces: list[str], stops: list[str], include: bool
) -> None:
    expected = by_the_obvious_method("".join(pieces), stops, include)
    assert scan_in_pieces(pieces, stops, include) == expected


@given(TEXT, STOPS)
def test_only_what_could_begin_a_stop_string_is_held_back(text: str, stops: list[str]) -> None:
    scan = watch(*stops).scan(text)
    if scan.stop is None:
        held = text[len(scan.text) :]
        longest = max(
            (n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n])), default=0
        )
        assert len(held) == longest


def test_a_stop_string_across_pieces_never_shows() -> None:
    scanner = watch("</end>")
    assert scanner.scan("so </e").text == "so "
    assert scanner.scan("nd").text == ""
    scan = scanner.scan("> more")
    assert (scan.text, scan.stop) == ("", "</end>")


def test_what_only_looked_like_a_stop_string_comes_out() -> None:
    scanner = watch("</end>")
    assert scanner.scan("a </en").text + scanner.scan("try>").text == "a </entry>"
    assert scanner.scan("</e").text + scanner.flush() == "</e"


def test_a_match_in_an_unarmed_piece_does_not_count_but_its_end_may_begin_one() -> None:
    scanner = watch("aa")
    unarmed = scanner.scan("aa", armed=False)
    assert (unarmed.text, unarmed.stop) == ("a", None)
    scan = scanner.scan("a.")
    assert (scan.text, scan.stop) == ("", "aa")


def test_tok_03_a_stop_string_of_ten_kilobytes_costs_linear_time() -> None:
    scanner = watch("a" * 10_000 + "b")
    out = "".join(scanner.scan("a" * 1000).text for _ in range(40))
    assert out + scanner.flush() == "a" * 40_000
