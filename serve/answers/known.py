"""Formats by vLLM's parser names, for models whose chat template does not show how they answer."""

from __future__ import annotations

from typing import Final

from serve.answers.format import CallFormat, Markers

CALLS: Final = {
    "hermes": CallFormat("json", "<tool_call>", "</tool_call>"),
    "llama3_json": CallFormat("json", "", arguments_key="parameters"),
    "mistral": CallFormat("json_list", "[TOOL_CALLS]"),
    "granite": CallFormat("json_list", "<|tool_call|>"),
    "phi4_mini_json": CallFormat("json_list", "functools"),
    "deepseek_v31": CallFormat(
        "tag_json",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        name_end="<｜tool▁sep｜>",
        section_open="<｜tool▁calls▁begin｜>",
        section_close="<｜tool▁calls▁end｜>",
    ),
}
"""Of these `--tool-call-parser` offers hermes. The markers of the others have not been held against
their models' templates; until they are, only the reader's tests go by them."""

REASONING: Final = {
    "deepseek_r1": Markers("<think>", "</think>"),
    "qwen3": Markers("<think>", "</think>"),
    "granite": Markers("Here is my thought process:", "Here is my response:"),
}
"""For `--reasoning-parser`."""
