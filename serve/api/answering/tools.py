"""A request's tools and which of them may be called; what was called, as the API writes it."""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from serve.answers.check import VERDICTS, keywords_of
from serve.answers.events import CallArguments, CallBegun, calls_among
from serve.answers.known import CALLS
from serve.answers.schemas import check_schema
from serve.answers.tools import Tool, ToolWish, calls_form
from serve.api.answering.parts import Part
from serve.api.errors import Unsupported
from serve.api.protocol.chat import ChatCompletionRequest
from serve.config import ServerConfig
from serve.errors import InvalidRequest
from serve.sampling_params import Grammar

MAX_TOOLS = 256
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class AskedTools(NamedTuple):
    """The names that may be called, and the grammar that holds the answer to it. `relaxed`: the
    places of their schemas that it is not held to. `is_named`: the request names the one to call,
    and its answer then ends with "stop" as OpenAI's does."""

    names: tuple[str, ...]
    grammar: Grammar
    relaxed: tuple[str, ...]
    is_named: bool
    must_call: bool


async def asked_tools(body: ChatCompletionRequest, config: ServerConfig) -> AskedTools | None:
    """None where nothing may be called. Raises InvalidRequest, naming the field."""
    choice = body.tool_choice
    if not body.tools:
        if choice not in (None, "none", "auto"):
            raise InvalidRequest("tool_choice needs tools.", param="tool_choice")
        return None
    if choice == "none":
        return None
    if config.tool_call_parser == "none":
        raise Unsupported(
            "This server is not told how its model calls tools (--tool-call-parser); leave tools "
            "out, or set tool_choice to 'none'.",
            param="tools",
        )
    # Large schemas take long, which nobody else shall wait for.
    return await asyncio.to_thread(_asked, body.tools, choice, body, config)


def _asked(
    listed: Sequence[Any], choice: Any, body: ChatCompletionRequest, config: ServerConfig
) -> AskedTools:
    if len(listed) > MAX_TOOLS:
        raise InvalidRequest(
            f"tools has {len(listed)} entries, at most {MAX_TOOLS}.", param="tools"
        )
    checked = [_tool(tool, i, config) for i, tool in enumerate(listed)]
    names = [tool.name for tool, _ in checked]
    if len(set(names)) < len(names):
        raise InvalidRequest("tools must have different names.", param="tools")
    mode, allowed = _choice(choice, names)
    chosen = [(tool, relaxed) for tool, relaxed in checked if tool.name in allowed]
    tools = [tool for tool, _ in chosen]
    parallel = body.parallel_tool_calls is not False and mode != "named"
    wish = ToolWish(tools, mode != "auto", parallel)
    text = calls_form(CALLS[config.tool_call_parser], wish)
    verdict = VERDICTS.of(text)
    if verdict.error is not None:
        raise InvalidRequest(f"tools cannot be held to: {verdict.error}.", param="tools")
    places = [place for _, relaxed in chosen for place in relaxed]
    return AskedTools(
        names=tuple(tool.name for tool in tools),
        grammar=Grammar(text=text),
        relaxed=(*places, *keywords_of(verdict.warnings)),
        is_named=mode == "named",
        must_call=wish.must_call,
    )


def _tool(tool: Any, number: int, config: ServerConfig) -> tuple[Tool, list[str]]:
    """A tool, and the places of its schema, from the request's root, that cannot be held to."""
    path = f"tools.{number}"
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or tool.get("type") != "function":
        raise InvalidRequest(
            f"{path} must be {{'type': 'function', 'function': {{…}}}}.", param=path
        )
    name = function.get("name")
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise InvalidRequest(
            f"{path}.function.name must have 1 to 64 letters, digits, '_', '-' or '.'.",
            param=f"{path}.function.name",
        )
    schema = function.get("parameters")
    field = f"{path}.function.parameters"
    if schema is None:
        schema = {"type": "object", "properties": {}, "additionalProperties": False}
    if not isinstance(schema, dict):
        raise InvalidRequest(f"{field} must be a JSON schema: an object.", param=field)
    strict = bool(function.get("strict")) or config.strict_schemas
    checked = check_schema(schema, field, strict=strict, max_bytes=config.max_schema_bytes)
    kept = checked.schema if isinstance(checked.schema, dict) else {}
    places = [f"/tools/{number}/function/parameters{place}" for place in checked.relaxed]
    return Tool(name, {"type": "object", **kept}, lenient=not strict), places


def _choice(choice: Any, names: Sequence[str]) -> tuple[str, Sequence[str]]:
    """The mode (auto, required or named), and the names that may be called."""
    if choice in (None, "auto", "required"):
        return choice or "auto", names
    if isinstance(choice, Mapping) and choice.get("type") == "function":
        return "named", [_known(choice.get("function"), names, "tool_choice.function")]
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        allowed = choice.get("allowed_tools")
        field = "tool_choice.allowed_tools"
        if isinstance(allowed, Mapping) and allowed.get("mode") in ("auto", "required"):
            tools = allowed.get("tools")
            if isinstance(tools, list) and tools:
                listed = [
                    tool.get("function") if isinstance(tool, dict) else None for tool in tools
                ]
                return allowed["mode"], [_known(function, names, field) for function in listed]
        raise InvalidRequest(f"{field} must have a mode and tools.", param=field)
    raise InvalidRequest(
        "tool_choice must be 'none', 'auto', 'required', or name a function.", param="tool_choice"
    )


def _known(function: Any, names: Sequence[str], field: str) -> str:
    name = function.get("name") if isinstance(function, Mapping) else None
    if name not in names:
        raise InvalidRequest(f"{field} must name one of tools.", param=field)
    return str(name)


# ---------------------------------------------------------------------------- what was called


def calls_of(parts: Sequence[Part]) -> list[dict[str, Any]]:
    """The calls among a whole answer's parts, in chat's shape."""
    return [_call(call.name, call.arguments) for call in calls_among(parts)]


def call_delta(part: Part) -> dict[str, Any] | None:
    """What a part adds to a stream's calls."""
    if isinstance(part, CallBegun):
        return {"index": part.index, **_call(part.name, "")}
    if isinstance(part, CallArguments):
        return {"index": part.index, "function": {"arguments": part.text}}
    return None


def ends_in_calls(parts: Sequence[Part]) -> bool:
    """Whether there are calls, and each of them is whole."""
    calls = calls_among(parts)
    return bool(calls) and all(call.whole for call in calls)


def _call(name: str, arguments: str) -> dict[str, Any]:
    return {
        "id": f"call_{uuid.uuid4().hex[:24]}",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }
