"""A model's chat template: checked at start, rendered in a sandbox with a time limit.

The environment is the one that checkpoints' templates are written for (transformers' conventions:
trimmed blocks, loop controls, `raise_exception`, `strftime_now`, unescaped `tojson`,
`{% generation %}`). Rendering goes on in a thread that nobody can stop from outside, so every loop
of the template looks at the deadline itself.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from serve.errors import InvalidRequest

DEADLINE = "_render_deadline"
"""Render variable: time.monotonic() after which loops give up."""


class ChatTemplate:
    """One compiled template. Immutable, so threads may share it.

    Raises jinja2.TemplateSyntaxError for a text that is none.
    """

    def __init__(self, source: str) -> None:
        environment = _environment()
        tree = environment.parse(source)
        names = {str(node.value) for node in tree.find_all(nodes.Const)}
        self.knows_developer = "developer" in names
        self.wants_content_parts = _loops_over_content(tree) and not _tests_for_string(tree)
        for loop in tree.find_all(nodes.For):
            loop.iter = nodes.Filter(
                loop.iter, "until_deadline", [], [], None, None, lineno=loop.lineno
            )
        tree.set_environment(environment)
        code = environment.compile(tree)
        self._template = jinja2.Template.from_code(environment, code, environment.globals)

    def render(self, variables: Mapping[str, Any], time_limit_s: float) -> str:
        """The prompt's text. Raises InvalidRequest with what the template had to say."""
        deadline = time.monotonic() + time_limit_s
        try:
            return self._template.render({**variables, DEADLINE: deadline})
        except _OutOfTime as error:
            raise InvalidRequest(
                f"The chat template did not finish within {time_limit_s:g} s for these messages.",
                param="messages",
            ) from error
        except jinja2.TemplateError as error:
            text = error.message or type(error).__name__
            raise InvalidRequest(f"The chat template refused: {text}", param="messages") from error
        except Exception as error:  # a template is a program: it can fail like one
            raise InvalidRequest(
                f"The chat template failed on these messages: {type(error).__name__}: {error}",
                param="messages",
            ) from error


class _OutOfTime(Exception):
    """A loop of the template passed the deadline."""


class _Timed:
    """An iterable whose iteration ends in _OutOfTime after the deadline; len() stays what it was,
    so that `loop.length` and `loop.last` do."""

    def __init__(self, iterable: Any, deadline: float) -> None:
        self._iterable = iterable
        self._deadline = deadline

    def __iter__(self) -> Iterator[Any]:
        for item in self._iterable:
            if time.monotonic() > self._deadline:
                raise _OutOfTime
            yield item

    def __len__(self) -> int:
        return len(self._iterable)


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's part for training; here its
    content alone counts."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own declaration)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.filters["until_deadline"] = _until_deadline
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment


@jinja2.pass_context
def _until_deadline(context: Context, iterable: Any) -> _Timed:
    return _Timed(iterable, context[DEADLINE])


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


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
