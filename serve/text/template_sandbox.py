"""The environment that chat templates run in: Jinja's sandbox, in which nothing is without a bound.

It is the one that checkpoints' templates are written for (transformers' conventions: trimmed
blocks, loop controls, `raise_exception`, `strftime_now`, unescaped `tojson`, `{% generation %}`).
Operators are intercepted, which also keeps the compiler from working them out; calls, filters and
tests pass through here; and what Jinja compiles to plain Python (loops, comparisons, slices, `~`)
is put into filters of ours before it is compiled.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from serve.text.template_bounds import (
    before_filter,
    before_format_method,
    before_method,
    before_operator,
)
from serve.text.template_budget import TooLarge, budget, check_chars, weigh

_PIECE_CHARS = 8  # what each piece of a text counts for beside its characters
_TURN_BYTES = 8  # and each turn of a loop, which may leave a piece behind
_MAX_PATTERN = 1000
_MAX_INDENT = 16
_COMPARING = ("eq", "ne", "lt", "le", "gt", "ge", "in")


def _concat(pieces: Iterable[str]) -> str:
    """The output of a template, a macro or a block."""
    spent = budget()
    kept, size = [], 0
    for piece in pieces:
        spent.check_time()
        kept.append(piece)
        size += len(piece) + _PIECE_CHARS
        check_chars(size)
    text = "".join(kept)
    spent.spend(text)
    return text


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Whatever a template makes is asked for from the rendering's budget."""

    concat = staticmethod(_concat)
    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "%", "**"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, loopcontrols],
            finalize=_weighed,
        )
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        self.filters["tojson"] = _to_json
        self.filters = {name: _bounded(name, f) for name, f in self.filters.items()}
        self.filters |= {
            "_timed": _Timed,
            "_joined": _joined,
            "_weighed": _weighed,
            "_taken": _taken,
        }
        tests: dict[str, Any] = self.tests
        compare = {tests[name] for name in _COMPARING}
        self.tests = {n: _weighing(test) if test in compare else test for n, test in tests.items()}

    def compile_bounded(self, tree: nodes.Template) -> jinja2.Template:
        """A template that has been parsed here. `tree` is changed."""
        _PutInFilters().visit(tree)
        tree.set_environment(self)
        code = self.compile(tree)
        return jinja2.Template.from_code(self, code, self.globals)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """An operator, once its result is known to be of bounded size."""
        budget().check_time()
        before_operator(operator, left, right)
        result = super().call_binop(context, operator, left, right)
        budget().spend(result)
        return result

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """A macro, a function or a method of a value."""
        budget().check_time()
        if not isinstance(function, Macro):
            args = before_method(function, args, kwargs)
        result = super().call(context, function, *args, **kwargs)
        if not isinstance(getattr(function, "__self__", None), Mapping):  # they hand out their own
            budget().spend(result)
        return result

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """str.format and str.format_map; the sandbox has its own, which we bound."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        @functools.wraps(wrapped)
        def bounded(*args: Any, **kwargs: Any) -> str:
            before_format_method(value.__self__, args, kwargs)
            return wrapped(*args, **kwargs)

        return bounded

    def getitem(self, obj: Any, argument: Any) -> Any:
        """`obj[argument]`: a key is hashed, which takes as long as it is large."""
        if isinstance(argument, tuple):
            weigh(argument)
        return super().getitem(obj, argument)


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's part for training; here its
    content alone counts."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own declaration)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _PutInFilters(NodeTransformer):
    """Puts what would become plain Python into filters that look at the budget."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _filter(node.iter, "_timed")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        first, *others = node.nodes
        return _filter(first, "_joined", others)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _filter(node, "_taken") if isinstance(node.arg, nodes.Slice) else node

    def visit_AssignBlock(self, node: nodes.AssignBlock) -> nodes.Node:
        self.generic_visit(node)
        node.filter = _filter(node.filter, "_taken")
        return node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:
        self.generic_visit(node)
        if not isinstance(node.key, nodes.Const):
            node.key = _filter(node.key, "_weighed")
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        """With a text or a number nothing is compared but that."""
        self.generic_visit(node)
        only, *others = node.ops
        is_search = only.op in ("in", "notin")
        constants = [node.expr] if is_search else [node.expr, only.expr]
        if not others and any(isinstance(each, nodes.Const) for each in constants):
            return node
        node.expr = _filter(node.expr, "_weighed")
        for operand in node.ops:
            operand.expr = _filter(operand.expr, "_weighed")
        return node


def _filter(
    node: nodes.Node | None, name: str, args: list[nodes.Expr] | None = None
) -> nodes.Filter:
    lineno = None if node is None else node.lineno
    return nodes.Filter(node, name, args or [], [], None, None, lineno=lineno)


def _bounded(name: str, apply: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that asks first. Some are handed the context or the like before the value."""
    at = 1 if hasattr(apply, "jinja_pass_arg") else 0

    @functools.wraps(apply)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        if len(args) <= at:
            return apply(*args, **kwargs)
        value = before_filter(name, args[at], args[at + 1 :], kwargs)
        result = apply(*args[:at], value, *args[at + 1 :], **kwargs)
        if result is not value:
            budget().spend(result)
        return result

    return bounded


def _weighing(test: Callable[..., Any]) -> Callable[..., bool]:
    def bounded(*args: Any) -> bool:
        for value in args:
            weigh(value)
        return bool(test(*args))

    return bounded


def _weighed(value: Any) -> Any:
    """The value, which may be shown, compared or hashed."""
    if not isinstance(value, str):
        weigh(value)
    return value


def _taken(value: Any) -> Any:
    """A copy of something, which counts."""
    budget().spend(value)
    return value


def _joined(*values: Any) -> str:
    """`a ~ b`."""
    check_chars(sum(map(weigh, values)))
    text = "".join(map(str, values))
    budget().spend(text)
    return text


class _Timed:
    """An iterable whose iteration ends in OutOfTime after the deadline; len() stays what it was, so
    that `loop.length` and `loop.last` do."""

    def __init__(self, iterable: Any) -> None:
        self._iterable = iterable

    def __iter__(self) -> Iterator[Any]:
        spent = budget()
        for item in self._iterable:
            spent.check_time()
            spent.spend_bytes(_TURN_BYTES)
            yield item

    def __len__(self) -> int:
        return len(self._iterable)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    size = len(indent) if isinstance(indent, str) else indent or 0
    if size > _MAX_INDENT:
        raise TooLarge(f"an indent of {size:,} columns; at most {_MAX_INDENT}")
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    return _concat(encoder.iterencode(value))


def _strftime_now(pattern: str) -> str:
    if len(pattern) > _MAX_PATTERN:
        raise TooLarge(f"a date of {len(pattern):,} characters; at most {_MAX_PATTERN}")
    return datetime.now().strftime(pattern)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
