"""What guesses a request's next tokens. A wrong guess costs time, never an answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from serve.scheduler.request import Request


class Draft(NamedTuple):
    """Tokens that may come next, and how many of the last ones they were found behind: drafts
    behind longer matches are right more often."""

    token_ids: Sequence[int]
    num_matched: int


NOTHING = Draft((), 0)


class Drafter(Protocol):
    """Looks at known tokens and keeps what it needs to find them again."""

    def propose(self, request: Request, most: int) -> Draft:
        """At most `most` tokens that may follow its known ones."""

    def forget(self, request: Request) -> None:
        """The request is over."""
