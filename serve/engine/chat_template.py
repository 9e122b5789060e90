"""A model's chat template: checked at start, rendered in a sandbox within a budget."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import jinja2
from jinja2 import nodes

from serve.engine.template_budget import OutOfTime, TooLarge, spending
from serve.engine.template_sandbox import BoundedEnvironment
from serve.errors import InvalidRequest

MAX_TEMPLATE_CHARS: Final = 1 << 17
"""Of a template's text; the longest that models come with have a quarter of it."""
_COMPILE_TIME_LIMIT_S = 5.0
_MAX_REASON_CHARS = 500


class ChatTemplate:
    """One compiled template. Immutable, so threads may share it.

    Raises jinja2.TemplateError, its message one line, for a text that is none.
    """

    def __init__(self, source: str) -> None:
        if len(source) > MAX_TEMPLATE_CHARS:
            raise jinja2.TemplateSyntaxError(
                f"it has {len(source):,} characters, at most {MAX_TEMPLATE_CHARS:,} are read", 1
            )
        try:
            with spending(_COMPILE_TIME_LIMIT_S):
                self._compile(source)
        except jinja2.TemplateSyntaxError as error:
            raise jinja2.TemplateSyntaxError(_reason(error), error.lineno) from error
        except Exception as error:  # the compilers of Jinja and Python have limits of many kinds
            raise jinja2.TemplateSyntaxError(_reason(error), 1) from error

    def _compile(self, source: str) -> None:
        environment = BoundedEnvironment()
        tree = environment.parse(source)
        names = {str(node.value) for node in tree.find_all(nodes.Const)}
        self.knows_developer = "developer" in names
        self.wants_content_parts = _loops_over_content(tree) and not _tests_for_string(tree)
        self._template = environment.compile_bounded(tree)

    def render(self, variables: Mapping[str, Any], time_limit_s: float) -> str:
        """The prompt's text. Raises InvalidRequest with what the template had to say."""
        try:
            with spending(time_limit_s):
                return self._template.render(variables)
        except OutOfTime as error:
            raise InvalidRequest(
                f"The chat template did not finish within {time_limit_s:g} s for these messages.",
                param="messages",
            ) from error
        except TooLarge as error:
            raise InvalidRequest(
                f"The chat template asks for too much on these messages: {error}.",
                param="messages",
            ) from error
        except jinja2.TemplateError as error:
            text = (error.message or type(error).__name__)[:_MAX_REASON_CHARS]
            raise InvalidRequest(f"The chat template refused: {text}", param="messages") from error
        except Exception as error:  # a template is a program: it can fail like one
            raise InvalidRequest(
                f"The chat template failed on these messages: {_reason(error)}",
                param="messages",
            ) from error


def _reason(error: Exception) -> str:
    """One line, of bounded length."""
    known = isinstance(error, jinja2.TemplateError | TooLarge)
    text = str(error) if known else f"{type(error).__name__}: {error}"
    return (text.split("\n", 1)[0] or type(error).__name__)[:_MAX_REASON_CHARS]


def _loops_over_content(tree: nodes.Template) -> bool:
    """Whether a loop runs over a message's content, which is then a list of parts."""
    return any(_is_content(loop.iter) for loop in tree.find_all(nodes.For))


def _is_content(node: nodes.Node) -> bool:
    match node:
        case nodes.Getattr(attr="content") | nodes.Name(name="content"):
            return True
        case nodes.Getitem(arg=nodes.Const(value="content")):
            return True
    return False


def _tests_for_string(tree: nodes.Template) -> bool:
    return any(test.name == "string" for test in tree.find_all(nodes.Test))
