"""The items of a Responses conversation: what a request gives, what is kept of it, and the chat
messages that they are."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import TypeAdapter

from serve.api.errors import MissingField, Unsupported
from serve.api.openai.response_store import ResponseStore, StoredItem
from serve.api.protocol.bounds import MAX_MESSAGES
from serve.api.protocol.chat import FunctionCall, Message, ToolCall
from serve.api.protocol.responses import InputItem, OutputMessage, ResponsesRequest
from serve.errors import InvalidRequest

SYSTEM_ROLES = ("system", "developer")
_FIELDS = TypeAdapter(dict[str, Any])
_ID_PREFIXES = {"function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}


class Conversation:
    """Everything up to the answer that is asked for, without the instructions.

    `items` is what will be kept of it; `paths[i]` says where message i stands in the request. No
    more may come from the store than a request may bring itself. Raises RequestError.
    """

    def __init__(self, body: ResponsesRequest, store: ResponseStore, max_bytes: int) -> None:
        self.items: list[StoredItem] = []
        self.messages: list[Message] = []
        self.paths: list[str] = []
        self._body = body
        self._store = store
        self._max_bytes = max_bytes
        self._stored_bytes = 0
        self._from_store: set[StoredItem] = set()
        self._add_earlier()
        for path, item in _given(body):
            if _is_reference(item):
                self._add_stored(self._referred(item, path), path)
            else:
                self._add(item, path)
                if body.store is not False:
                    self.items.append(stored_item(item))

    def _add_earlier(self) -> None:
        name = "previous_response_id"
        if (response_id := self._body.previous_response_id) is None:
            return
        items = self._store.get(response_id, name).items
        if self._body.truncation == "auto":
            given = self._body.input
            num_given = 1 if isinstance(given, str) else len(given)
            items = _newest(items, MAX_MESSAGES - num_given, self._max_bytes)
        for item in items:
            self._add_stored(item, name)

    def _add_stored(self, item: StoredItem, path: str) -> None:
        self._stored_bytes += len(item.json)
        if self._stored_bytes > self._max_bytes:
            raise InvalidRequest(
                f"The stored conversation has more than {self._max_bytes} bytes, which is the most "
                "that a request may bring (--max-request-bytes). Begin a new one, or set "
                "truncation to 'auto'.",
                param=path,
            )
        self._from_store.add(item)
        self.items.append(item)
        self._add(InputItem.model_validate_json(item.json), path)

    def _add(self, item: InputItem, path: str) -> None:
        if item.type != "reasoning":  # what was thought is no message
            self.messages.append(_message(item, path))
            self.paths.append(path)

    def _referred(self, item: InputItem, path: str) -> StoredItem:
        if item.id is None:
            raise MissingField(f"{path}.id is required.", param=f"{path}.id")
        found = self._store.item(item.id, f"{path}.id")
        if found in self._from_store:
            raise InvalidRequest(
                f"{path}.id: the item {item.id!r} is in the conversation already. Leave it out.",
                param=f"{path}.id",
            )
        return found


def stored_item(item: InputItem) -> StoredItem:
    """What is kept of an item that a request gave: in full form, and with an id."""
    kind = item.type or "message"
    item_id = item.id or f"{_ID_PREFIXES.get(kind, 'msg')}_{uuid.uuid4().hex}"
    fields: dict[str, Any] = {"id": item_id, "type": kind, "status": "completed"}
    fields |= item.model_dump(exclude_none=True)
    if kind == "message" and isinstance(item.content, str):
        part: dict[str, Any] = {"type": "input_text", "text": item.content}
        if item.role == "assistant":
            part |= {"type": "output_text", "annotations": []}
        fields["content"] = [part]
    return StoredItem(
        item_id, _FIELDS.dump_json(fields), item.id is None, item.role in SYSTEM_ROLES
    )


def said_item(message: OutputMessage) -> StoredItem:
    """What is kept of an answer's item: later turns need its text alone."""
    content = [part.model_copy(update={"logprobs": []}) for part in message.content]
    bare = message.model_copy(update={"content": content})
    return StoredItem(message.id, bare.model_dump_json().encode(), is_ours=True)


def item_fields(item: StoredItem) -> dict[str, Any]:
    """An item as the API lists it."""
    return _FIELDS.validate_json(item.json)


def _given(body: ResponsesRequest) -> Iterator[tuple[str, InputItem]]:
    if isinstance(body.input, str):
        yield "input", InputItem(role="user", content=body.input)
        return
    for i, item in enumerate(body.input):
        yield f"input.{i}", item


def _is_reference(item: InputItem) -> bool:
    bare = item.type is None and item.role is None and item.content is None
    return item.type == "item_reference" or (bare and item.id is not None)


def _newest(items: Sequence[StoredItem], max_items: int, max_bytes: int) -> tuple[StoredItem, ...]:
    """As many of the last items as there may be, and those that instruct."""
    kept: list[StoredItem] = []
    room = max_bytes - sum(len(item.json) for item in items if item.is_system)
    max_items -= sum(item.is_system for item in items)
    for item in reversed(items):
        if not item.is_system:
            room, max_items = room - len(item.json), max_items - 1
        if item.is_system or (room >= 0 and max_items >= 0):
            kept.append(item)
    return tuple(reversed(kept))


def _message(item: InputItem, path: str) -> Message:
    match item.type or "message":
        case "message" if item.role is not None:
            return Message(role=item.role, content=item.content)
        case "function_call":
            function = FunctionCall(name=item.name or "", arguments=item.arguments)
            call = ToolCall(id=item.call_id, type="function", function=function)
            return Message(role="assistant", tool_calls=[call])
        case "function_call_output":
            return Message(role="tool", tool_call_id=item.call_id, content=item.output)
        case "message":
            raise InvalidRequest(f"{path}.role is required.", param=f"{path}.role")
    raise Unsupported(f"Items of this type are not supported: {path}.", param=f"{path}.type")
