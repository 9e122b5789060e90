"""How a model writes reasoning and tool calls: one record, which the reader goes by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

CallKind = Literal["json", "json_list", "tag_json"]


@dataclass(frozen=True, slots=True)
class Markers:
    """What stands before and after a part of an answer, without the white space around it."""

    open: str
    close: str


@dataclass(frozen=True, slots=True)
class CallFormat:
    """`json`: `open {"name": …, "arguments": {…}} close`. `json_list`: a list of such objects.
    `tag_json`: `open name name_end {…} close`.

    White space between these parts is the model's to choose. `open` may be empty for `json`: then
    a call begins the content. A section's markers stand around all calls together.
    """

    kind: CallKind
    open: str
    close: str = ""
    name_end: str = ""
    section_open: str = ""
    section_close: str = ""
    name_key: str = "name"
    arguments_key: str = "arguments"

    def __post_init__(self) -> None:
        if not self.open and self.kind != "json":
            raise ValueError(f"calls of the kind {self.kind} need an opening marker")
        if (self.kind == "tag_json") != bool(self.name_end):
            raise ValueError("name_end belongs to the kind tag_json, and only to it")


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """`source` says where the record is from, for the log."""

    reasoning: Markers | None = None
    calls: CallFormat | None = None
    source: str = ""

    def begins_in_reasoning(self, prompt: str) -> bool:
        """Whether the prompt's end has opened the reasoning, so that the answer goes on with it."""
        if self.reasoning is None:
            return False
        tail = prompt.rstrip()
        return bool(self.reasoning.open) and tail.endswith(self.reasoning.open.strip())
