"""Progress bars: where they show, and what they say."""

from __future__ import annotations

import sys

import pytest

from serve.progress import BatchBar, StartBar


def test_a_batch_tells_what_is_done_what_failed_and_its_tokens(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with BatchBar("requests", 3, shown=True) as bar:
        bar.advance(5, done=1)
        bar.advance(7, done=2, failed=1)
    shown = capsys.readouterr().err
    assert "requests" in shown
    assert "3/3" in shown
    assert "12 tokens, 1 failed" in shown


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_start_shows_its_bar_on_a_terminal_only(
    is_terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    monkeypatch.setenv("TERM", "xterm")
    with StartBar("loading weights", 4) as bar:
        bar.advance(3)
        bar.advance()
    told = capsys.readouterr()
    assert ("loading weights" in told.err) is is_terminal
    assert told.out == ""
