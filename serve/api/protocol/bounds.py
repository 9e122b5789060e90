"""How large the parts of a request may be: a name, a number and a type for each.

What lies beyond is refused with 400, naming the field, while the body is read: before anything is
made of it. What depends on the model or on flags (prompts in characters and tokens, log-probability
counts, the size of an answer) is checked where it is known; `docs/limits.md` lists all limits.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import Field

T = TypeVar("T")

MAX_NAME_CHARS = 1024  # users, roles, kinds of things
MAX_MODEL_CHARS = 2**14  # whoever names a model that is not here is told that, within reason
MAX_CALL_ID_CHARS = 2**16  # some proxies pack signatures into the ids of tool calls
MAX_TEMPLATE_CHARS = 2**18  # the longest known chat templates have 20,000
MAX_STOP_STRINGS = 64
MAX_STOP_CHARS = 1024
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARS = 256
MAX_BIASES = 4096
MAX_STOP_TOKENS = 1024
MAX_ALLOWED_TOKENS = 2**19  # above every vocabulary
MAX_TOKEN_IDS = 2**22  # of a prompt: above every context
MAX_PROMPTS = 1024
MAX_CHOICES = 128
MAX_MESSAGES = 8192
MAX_PARTS = 8192  # of one message
MAX_TOOL_CALLS = 1024  # of one message
MAX_TOOLS = 1024
MAX_DOCUMENTS = 1024
MAX_OBJECT_FIELDS = 1024
MAX_METADATA_FIELDS = 64
MAX_REQUEST_IDS = 1024
MAX_INCLUDED = 64

MAX_GRAMMAR_CHARS = 2**18  # --max-schema-bytes may say less
MAX_FORM_CHOICES = 1000

Listed = Annotated[list[T], Field(fail_fast=True)]
"""A list whose first bad item ends the validation: a body may hold a million of them."""


Name = Annotated[str, Field(max_length=MAX_NAME_CHARS)]
ModelName = Annotated[str, Field(max_length=MAX_MODEL_CHARS)]
CallId = Annotated[str, Field(max_length=MAX_CALL_ID_CHARS)]
StopString = Annotated[str, Field(max_length=MAX_STOP_CHARS)]
StopStrings = Annotated[Listed[StopString], Field(max_length=MAX_STOP_STRINGS)]
BadWords = Annotated[
    Listed[Annotated[str, Field(max_length=MAX_BAD_WORD_CHARS)]], Field(max_length=MAX_BAD_WORDS)
]
GrammarText = Annotated[str, Field(max_length=MAX_GRAMMAR_CHARS)]
FormChoices = Annotated[Listed[GrammarText], Field(max_length=MAX_FORM_CHOICES)]
JsonObject = Annotated[dict[str, Any], Field(max_length=MAX_OBJECT_FIELDS)]
"""An object that reaches a template or nobody; what is within it counts to the body's limits."""
Metadata = Annotated[dict[str, Any], Field(max_length=MAX_METADATA_FIELDS)]
Tools = Annotated[Listed[JsonObject], Field(max_length=MAX_TOOLS)]
