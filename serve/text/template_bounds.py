"""What operators, methods and filters are about to make, checked beforehand at its largest.

Everything not named here makes no more than a few times what it is given.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

from serve.text.template_budget import (
    MAX_BITS,
    MAX_ITEMS,
    TooLarge,
    bounded_list,
    budget,
    check_chars,
    check_items,
    weigh,
)

MAX_WIDTH: Final = 1 << 16
"""Columns that a value may be padded to by a format, and steps of other filters."""
_MAX_HEAVY: Final = 1 << 16  # characters, where the work grows faster than the text
_SEQUENCES: Final = (str, bytes, bytearray, list, tuple)
_PRINTF = re.compile(r"%(?:\([^)]*\))?[-+ #0]*(\*|\d+)?(?:\.(\*|\d+))?[hlL]?.", re.DOTALL)
_JINJAS_OWN: Final = ("_loop_vars", "_block_vars")  # among the arguments of calls
_NUMBER = re.compile(r"\d+")


def before_operator(operator: str, left: Any, right: Any) -> None:
    """Raises TooLarge where the result would be; other errors are the operator's own."""
    if operator == "*":
        for one, other in ((left, right), (right, left)):
            if isinstance(one, _SEQUENCES) and isinstance(other, int):
                _check_like(one, len(one) * max(0, other))
    elif operator == "+" and isinstance(left, _SEQUENCES) and isinstance(right, _SEQUENCES):
        _check_like(left, len(left) + len(right))
    elif operator == "%" and isinstance(left, str):
        _before_printf(left, right)
    if isinstance(left, int) and isinstance(right, int):
        num_bits = _result_bits(operator, left, right)
        if num_bits > MAX_BITS:
            raise TooLarge(f"a number of about {num_bits:,} bits; at most {MAX_BITS:,} are made")


def _check_like(sequence: Any, length: int) -> None:
    if isinstance(sequence, list | tuple):
        check_items(length)
    else:
        check_chars(length)


def _result_bits(operator: str, left: int, right: int) -> int:
    if operator == "**":
        return left.bit_length() * max(right, 0) if abs(left) > 1 else 1
    if operator == "*":
        return left.bit_length() + right.bit_length()
    return max(left.bit_length(), right.bit_length())


def _before_printf(template: str, values: Any) -> None:
    fields = list(_PRINTF.finditer(template))
    widths = [width for field in fields for width in field.groups() if width]
    if "*" in widths:
        raise TooLarge("a format whose width is a value")
    widest = _check_widths(widths)
    check_chars(len(template) + len(fields) * (widest + 2 * weigh(values)))


def _before_format(template: str, values: Any) -> None:
    """str.format. A field's format may itself hold fields, whose values nobody knows beforehand."""
    fields = [field for field in string.Formatter().parse(template) if field[1] is not None]
    formats = [spec or "" for _, _, spec, _ in fields]
    if any("{" in spec for spec in formats):
        raise TooLarge("a format whose width is a value")
    widest = _check_widths([number for spec in formats for number in _NUMBER.findall(spec)])
    check_chars(len(template) + len(fields) * (widest + 2 * weigh(values)))


def _check_widths(widths: Iterable[str]) -> int:
    widest = max((int(width) if len(width) < 9 else 10**9 for width in widths), default=0)
    if widest > MAX_WIDTH:
        raise TooLarge(f"a format of width {widest:,}; at most {MAX_WIDTH:,}")
    return widest


def before_method(method: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """The same for a call; what is not a method of a value makes nothing by itself. Returns the
    arguments to call it with, iterators among them read into lists."""
    args = tuple(bounded_list(arg) if isinstance(arg, Iterator) else arg for arg in args)
    for value in (*args, *(v for key, v in kwargs.items() if key not in _JINJAS_OWN)):
        weigh(value)
    owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
    if isinstance(owner, list | tuple) and name in ("index", "count"):
        weigh(owner)
    elif isinstance(owner, int) and name == "to_bytes":
        _limit(_argument(args, kwargs, 0, "length", 1))
    elif isinstance(owner, str | bytes | bytearray) and name in _METHODS:
        _METHODS[name](owner, args, kwargs)
    return args


def before_format_method(template: str, args: Any, kwargs: Any) -> None:
    """str.format and str.format_map, which the sandbox replaces by its own."""
    _before_format(template, (args, kwargs))


def _argument(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], at: int, name: str, default: Any
) -> Any:
    return args[at] if at < len(args) else kwargs.get(name, default)


def _limit(value: Any, most: int = MAX_WIDTH) -> None:
    if isinstance(value, int) and abs(value) > most:
        raise TooLarge(f"a step or width of {value:,}; at most {most:,}")


def _before_pad(text: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    width = _argument(args, kwargs, 0, "width", 80)
    if isinstance(width, int):
        check_chars(max(len(text), width))


def _before_replace(text: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    old, new = _argument(args, kwargs, 0, "old", ""), _argument(args, kwargs, 1, "new", "")
    if isinstance(old, str | bytes) and isinstance(new, str | bytes):
        is_alike = isinstance(text, str) == isinstance(old, str)
        check_chars(len(text) + (text.count(old) if is_alike else 0) * len(new))


def _before_expandtabs(text: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    size = _argument(args, kwargs, 0, "tabsize", 8)
    if isinstance(size, int):
        check_chars(len(text) + text.count("\t" if isinstance(text, str) else b"\t") * abs(size))


def _before_translate(text: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    if args and isinstance(args[0], Mapping):
        longest = max((len(v) for v in args[0].values() if isinstance(v, str)), default=1)
        check_chars(len(text) * max(1, longest))


def _before_join_method(text: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    if args:
        values = list(args[0]) if isinstance(args[0], Iterable) else []
        _before_join(values, text)


def _before_split(text: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    separator = _argument(args, kwargs, 0, "sep", None)
    if separator and isinstance(separator, type(text)):
        check_items(text.count(separator) + 1)
    elif len(text) > 2 * MAX_ITEMS:
        raise TooLarge(f"a text of {len(text):,} characters to be split")


def _before_strip(text: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Each character is looked for in all of the others."""
    if args and isinstance(args[0], str | bytes):
        _limit(len(args[0]), 256)


_Before = Callable[[Any, tuple[Any, ...], Mapping[str, Any]], None]
_METHODS: Final[Mapping[str, _Before]] = {
    **dict.fromkeys(("center", "ljust", "rjust", "zfill"), _before_pad),
    **dict.fromkeys(("split", "rsplit", "splitlines"), _before_split),
    **dict.fromkeys(("strip", "lstrip", "rstrip"), _before_strip),
    "replace": _before_replace,
    "expandtabs": _before_expandtabs,
    "translate": _before_translate,
    "join": _before_join_method,
}


def _before_join(values: list[Any], separator: Any) -> None:
    between = len(separator) if isinstance(separator, str | bytes) else weigh(separator)
    check_chars(sum(map(weigh, values)) + between * len(values))


def _before_indent(text: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    width = _argument(args, kwargs, 0, "width", 4)
    size = len(width) if isinstance(width, str) else width
    if isinstance(size, int):
        check_chars(len(text) + (len(text.splitlines()) + 1) * max(0, size))


def _before_wordwrap(text: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """At worst every character becomes a line."""
    _limit(len(text), _MAX_HEAVY)
    between = _argument(args, kwargs, 2, "wrapstring", None) or "\n"
    check_chars(len(text) * (1 + len(between)))


def _before_format_filter(text: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    _before_printf(text, kwargs or args)


def _before_heavy(text: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    _limit(len(text), _MAX_HEAVY)


_TEXT_FILTERS: Final[Mapping[str, _Before]] = {
    "center": _before_pad,
    "replace": _before_replace,
    "trim": _before_strip,
    "indent": _before_indent,
    "wordwrap": _before_wordwrap,
    "format": _before_format_filter,
    **dict.fromkeys(("striptags", "urlize", "urlencode"), _before_heavy),
}
_SHALLOW: Final = frozenset(
    ("length", "count", "first", "last", "default", "d", "attr", "items", "reverse", "list")
)
"""Filters that do not look into the values they are given, and so need not be weighed: the length
of all messages is asked for in each turn of a loop over them."""
_INTO_ITEMS: Final = frozenset(("list", "sort", "unique", "groupby", "min", "max", "reverse"))
_STEPS: Final[Mapping[str, tuple[str, int]]] = {
    "batch": ("linecount", MAX_WIDTH),
    "slice": ("slices", MAX_WIDTH),
    "round": ("precision", 100),
}


def before_filter(name: str, value: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The same for a filter. Returns the value to apply it to: an iterator is read into a list."""
    budget().check_time()
    if isinstance(value, Iterator) and (name not in _SHALLOW or name == "list"):
        value = bounded_list(value)
    if name not in _SHALLOW:
        for each in (value, *args, *kwargs.values()):
            weigh(each)
    if name in _TEXT_FILTERS:
        _TEXT_FILTERS[name](value if isinstance(value, str) else str(value), args, kwargs)
    elif name in _STEPS:
        key, most = _STEPS[name]
        _limit(_argument(args, kwargs, 0, key, 0), most)
    elif name == "join":
        values = list(value) if isinstance(value, Iterable) else []
        _before_join(values, _argument(args, kwargs, 0, "d", ""))
    elif name in _INTO_ITEMS and isinstance(value, str | bytes):
        check_items(len(value))
    elif name == "pprint":
        _limit(weigh(value), _MAX_HEAVY)
    elif name == "sum" and not isinstance(_argument(args, kwargs, 1, "start", 0), int | float):
        raise TooLarge("a sum of other things than numbers")
    return value
