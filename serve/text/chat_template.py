"""A model's chat template: checked at start, rendered in a sandbox within a budget."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Mapping
from typing import Any, Final

import jinja2
from jinja2 import nodes

from serve.errors import InvalidRequest
from serve.text.template_budget import OutOfTime, TooLarge, spending
from serve.text.template_sandbox import BoundedEnvironment

MAX_TEMPLATE_CHARS: Final = 1 << 17
"""Of a template's text; the longest that models come with have a quarter of it."""
_COMPILE_TIME_LIMIT_S = 5.0
_MAX_REASON_CHARS = 500
_MUCH_BYTES = 1 << 23  # made by one rendering; an ordinary one makes little more than its prompt


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
        self.knows_tools = any(name.name == "tools" for name in tree.find_all(nodes.Name))
        self.wants_content_parts = _loops_over_content(tree) and not _tests_for_string(tree)
        self._template = environment.compile_bounded(tree)

    def render(self, variables: Mapping[str, Any], time_limit_s: float) -> str:
        """The prompt's text. Raises InvalidRequest with what the template had to say."""
        with spending(time_limit_s) as budget:
            # What Template.render does, but for its rewriting of tracebacks.
            context = self._template.new_context(dict(variables))
            try:
                return self._template.environment.concat(self._template.root_render_func(context))
            except Exception as error:  # a template is a program: it can fail like one
                refusal = _refusal(error, time_limit_s)
                traceback.clear_frames(error.__traceback__)
            finally:
                context.vars.clear()
                if budget.spent_bytes > _MUCH_BYTES:
                    gc.collect()  # cycles, Jinja's and the template's, would keep it for long
            raise InvalidRequest(refusal, param="messages")


def _refusal(error: Exception, time_limit_s: float) -> str:
    if isinstance(error, OutOfTime):
        return f"The chat template did not finish within {time_limit_s:g} s for these messages."
    if isinstance(error, TooLarge):
        return f"The chat template asks for too much on these messages: {error}."
    if isinstance(error, jinja2.TemplateError):
        text = error.message or type(error).__name__
        return f"The chat template refused: {text[:_MAX_REASON_CHARS]}"
    return f"The chat template failed on these messages: {_reason(error)}"


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
