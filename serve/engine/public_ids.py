"""The ids that clients know: an answer has one made from its X-Request-Id, and goes by either.

A request's label in the engine and in the logs is its answer's id; when an answer has several
choices, each is a request of its own, whose label ends in the choice's number.
"""

from __future__ import annotations

CHAT = "chatcmpl-"
COMPLETION = "cmpl-"
MESSAGE = "msg_"
RESPONSE = "resp_"
PIN = "pin-"

PREFIXES = (CHAT, COMPLETION, MESSAGE, RESPONSE, PIN)
"""What an answer's id begins with, by its kind; the rest is the request's id."""


def answer_ids(asked: str) -> frozenset[str]:
    """Ids of the answers that a client may mean: this one, or one made from this request's id."""
    return frozenset((asked, *(prefix + asked for prefix in PREFIXES)))


def choice_label(answer_id: str, index: int) -> str:
    """The label of one choice of several."""
    return f"{answer_id}-{index}"


def answer_of(label: str) -> str | None:
    """The id of the answer to which a label belongs that ends in a choice's number; else None."""
    answer_id, dash, index = label.rpartition("-")
    return answer_id if dash and index.isdecimal() else None
