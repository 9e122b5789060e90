"""Templates: the conventions they are written for, their errors, and their time limit."""

from __future__ import annotations

import gc
import tracemalloc

import jinja2
import pytest

from serve.errors import InvalidRequest
from serve.text.chat_template import MAX_TEMPLATE_CHARS, ChatTemplate

HELLO = [{"role": "user", "content": "héllo <b>"}]

CONVENTIONS = [
    "{% for m in messages %}{{ m.role }}: {{ m['content'] }}\n{% endfor %}",
    "  {% if true %}\n  x\n  {% endif %}\ny",  # trimmed and stripped blocks
    "{% for i in range(9) %}{% if i == 2 %}{% continue %}{% endif %}{% if i == 4 %}{% break %}"
    "{% endif %}{{ i }}{% endfor %}",
    "{{ messages | tojson }}{{ {'b': 1, 'a': 'é'} | tojson(indent=2, sort_keys=true) }}",
    "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "{% for m in messages + messages %}{{ loop.index }}/{{ loop.length }} {{ loop.last }}"
    " {{ loop.previtem is defined }} {{ loop.revindex }};{% else %}none{% endfor %}",
    "{% set ns = namespace(n=0) %}{% for m in messages if m.role == 'user' %}"
    "{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "{% macro show(m) %}{% for c in m.content %}{{ c }}.{% endfor %}{% endmacro %}"
    "{{ show(messages[0]) }}",
    "{% for k, v in messages[0].items() %}{{ k }}={{ v }} {% endfor %}",
    "{% for x in missing %}a{% else %}empty{% endfor %}{{ bos_token }}",
    "{% macro arg(a) %}{% if a is mapping %}{% set ns = namespace(first=true) %}{{ '{' }}"
    "{% for k, v in a | dictsort %}{{ ',' if not ns.first }}{% set ns.first = false %}"
    "{{ k ~ ':' ~ arg(v) }}{% endfor %}{{ '}' }}{% elif a is sequence and a is not string %}"
    "[{% for x in a %}{{ arg(x) }}{% endfor %}]{% else %}{{ a }}{% endif %}{% endmacro %}"
    "{{ arg({'b': [1, 'x', {'c': none}], 'a': 2.5}) }}",
    "{% set t = messages[0].content.split('o')[0].lstrip('h').replace('l', 'L') %}"
    "{{ t * 2 + '-' * 3 }}{{ messages[1:] + messages[:-1] }}{{ messages[::-1][0].role }}"
    "{{ 'a,b'.split(',') | join('+') }}{{ 2 ** 10 % 7 }}"
    "{{ '%s %5.2f %-4d|' % ('x', 1.5, 7) }}{{ '{:>6} {x!r}'.format('a', x=[1]) }}"
    "{{ 'ab' | center(8) }}{{ 'a\nb' | indent(2) }}{{ '%s=%d' | format('n', 3) }}",
    "{{ [3, 1, 2] | sort | join(',') }}{{ range(9) | batch(4, 'x') | list }}{{ -7 // 3 }}"
    "{{ range(7) | slice(3) | map('list') | list }}{{ 'aa bb' | wordwrap(2) }}{{ 1.27 | round(1) }}"
    "{{ [1, 2] == [1, 2] }}{{ (1, 2) in [(1, 2)] }}{{ {(1, 2): 'k'}[(1, 2)] }}{{ [1, 2] | sum }}"
    "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}"
    "{{ messages | map(attribute='role') | unique | list }}{{ 'A' | lower ~ 1 ~ none }}",
    "{% set captured %}{% for m in messages %}<{{ m.content }}>{% endfor %}{% endset %}"
    "{{ captured | trim }}{% filter upper %}{{ captured }}{% endfilter %}{{ missing ~ 'x' }}",
    "{% for x in [1, [2, [3]]] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}",
]


def render(source: str, limit_s: float = 30.0, **variables: object) -> str:
    return ChatTemplate(source).render({"messages": HELLO, **variables}, limit_s)


@pytest.mark.parametrize("source", CONVENTIONS)
def test_templates_render_as_transformers_renders_them(source: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    (expected,), _ = render_jinja_template([HELLO], chat_template=source, bos_token="<s>")
    assert render(source, bos_token="<s>") == expected


def test_the_message_of_raise_exception_reaches_the_caller() -> None:
    with pytest.raises(InvalidRequest, match="roles must alternate") as error:
        render("{{ raise_exception('roles must alternate') }}")
    assert error.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content + 1 }}",
        "{{ messages[5].content.nothing }}",
        "{{ 1 / 0 }}",
        "{{ messages.append(1) }}",  # the sandbox keeps the caller's lists as they are
        "{{ ''.__class__.__mro__ }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ range(1000000000) | list }}",
    ],
)
def test_a_template_that_fails_is_the_requests_error(source: str) -> None:
    with pytest.raises(InvalidRequest, match="chat template"):
        render(source)
    assert len(HELLO) == 1


NESTED = "{% set ns = namespace(a=(1,), b=(1,)) %}{% for i in range(60) %}"
NESTED += "{% set ns.a = (ns.a, ns.a) %}{% set ns.b = (ns.b, ns.b) %}{% endfor %}"
"""Two tuples that would take 2**60 items to show, to compare or to hash."""
LARGE = "{% set b = 'b' * 1000000 %}"
DOUBLED = (
    "{% set ns = namespace(s=START) %}{% for i in range(60) %}{% set ns.s = EACH %}{% endfor %}"
)


def doubled(start: str, each: str) -> str:
    return DOUBLED.replace("START", start).replace("EACH", each)


TOO_LARGE = [
    # operators
    "{{ 'a' * 300000000 }}",
    "{{ 300000000 * 'a' }}",
    "{{ [1] * 300000000 }}",
    "{{ (1, 2) * 300000000 }}",
    "{{ 9**(9**8) % 7 }}",
    "{% set x = 99 %}{% set y = 999 %}{{ x ** (y ** 2) }}",
    doubled("7", "ns.s * ns.s"),
    doubled("'a'", "ns.s + ns.s"),
    doubled("'a'", "ns.s ~ ns.s"),
    doubled("[1]", "ns.s + ns.s"),
    "{{ '%030000000d' % 1 }}",
    "{{ '%*d' % (300000000, 1) }}",
    "{{ '%.300000000f' % 1 }}",
    "{{ '%(a)030000000d' % {'a': 1} }}",
    LARGE + "{{ '%s' * 10000 % ((b,) * 10000) }}",
    # methods
    *(f"{{{{ 'a'.{name}(300000000) }}}}" for name in ("center", "ljust", "rjust", "zfill")),
    "{{ 'a'.encode().center(300000000) }}",
    LARGE + "{{ ('a' * 10000).replace('a', b) }}",
    LARGE + "{{ ('a' * 10000).replace('', b) }}",
    LARGE + "{{ b.join('a' * 10000) }}",
    LARGE + "{{ b.join(range(10000) | map('string')) }}",
    "{{ '{:0300000000d}'.format(1) }}",
    "{{ '{:{w}d}'.format(1, w=300000000) }}",
    "{{ '{x:0300000000d}'.format_map({'x': 1}) }}",
    LARGE + "{{ ('{0}' * 10000).format(b) }}",
    "{{ ('\t' * 1000000).expandtabs(100000) }}",
    LARGE + "{{ ('a' * 1000000).translate({97: b}) }}",
    "{{ (1).to_bytes(300000000, 'big') }}",
    "{{ ('a' * 4000000).strip('b' * 4000000 ~ 'a') }}",
    "{{ ('a ' * 8000000).split() }}",
    "{{ ('a ' * 8000000).split(' ') }}",
    # filters and functions
    "{{ 'a' | center(300000000) }}",
    "{% filter center(300000000) %}a{% endfilter %}",
    "{{ ('a\n' * 1000000) | indent(100000) }}",
    "{{ '%0300000000d' | format(1) }}",
    LARGE + "{{ ('a' * 60000) | wordwrap(1, true, b) }}",
    "{{ [1] | batch(300000000, 'x') | list }}",
    "{{ [1] | slice(300000000) | list }}",
    "{{ 1.5 | round(300000000, 'ceil') }}",
    LARGE + "{{ range(99999) | join(b) }}",
    LARGE + "{{ ('a' * 10000) | replace('a', b) }}",
    "{{ [1, [2]] | tojson(indent=300000000) }}",
    "{{ [[1]] | sum(start=[]) }}",
    "{{ ('<!--' * 4000000) | striptags }}",
    "{{ ('a' * 16000000) | list }}",
    "{{ range(99999) | map('center', 16000000) | list }}",
    "{{ ('a' * 100000) | urlencode }}",
    "{{ strftime_now('%H' * 100000) }}",
    # output, macros, and what is kept on the way
    LARGE + "{% for i in range(99999) %}{{ b }}{% endfor %}",
    LARGE + "{% macro f() %}{% for i in range(99999) %}{{ b }}{% endfor %}{% endmacro %}{{ f() }}",
    LARGE + "{% set t %}{% for i in range(99999) %}{{ b }}{% endfor %}{% endset %}",
    LARGE + "{% set ns = namespace(l=[]) %}{% for i in range(99999) %}"
    "{% set ns.l = ns.l + [b[1:]] %}{% endfor %}",
    LARGE + "{% set ns = namespace(l=[]) %}{% for i in range(99999) %}"
    "{% set ns.l = ns.l + [b | upper] %}{% endfor %}",
    # lists that hold each other
    NESTED + "{{ ns.a }}",
    NESTED + "{{ ns.a ~ '' }}",
    NESTED + "{{ ns.a | tojson }}",
    NESTED + "{{ '%s' % (ns.a,) }}",
    NESTED + "{{ '{}'.format(ns.a) }}",
    NESTED + "{{ ns.a == ns.b }}",
    NESTED + "{{ ns.a in [ns.b] }}",
    NESTED + "{{ ns.a is eq(ns.b) }}",
    NESTED + "{{ [ns.a].index(ns.b) }}",
    NESTED + "{{ [ns.a, ns.b] | sort }}",
    NESTED + "{{ {1: 2}[ns.a] }}",
    NESTED + "{{ {ns.a: 2} }}",
    NESTED + "{{ {1: 2}.get(ns.a) }}",
    "{% set ns = namespace(a=()) %}{% for i in range(9999) %}{% set ns.a = (ns.a,) %}{% endfor %}"
    "{{ {1: 2}[ns.a] }}",
]


@pytest.mark.parametrize("source", TOO_LARGE)
def test_sec_45_nothing_that_a_template_makes_is_without_a_bound(source: str) -> None:
    with pytest.raises(InvalidRequest, match="asks for too much on these messages") as error:
        render(source)
    assert error.value.param == "messages"


def test_sec_45_what_a_refused_template_made_is_given_back_at_once() -> None:
    """Nothing may wait for the garbage collector, whose turn comes rarely in a server."""
    source = "{% set ns = namespace(l=[]) %}{% set ns.own = ns %}"
    source += "{% for i in range(99) %}{% set ns.l = ns.l + ['a' * 15000000] %}{% endfor %}"
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        for _ in range(2):
            with pytest.raises(InvalidRequest, match="asks for too much"):
                render(source)
        assert tracemalloc.get_traced_memory()[0] < 10_000_000
    finally:
        tracemalloc.stop()
        gc.enable()


def test_sec_45_calls_of_macros_pass_the_deadline_too() -> None:
    source = "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
    with pytest.raises(InvalidRequest, match="did not finish"):
        render(source + "{{ f(90) }}", limit_s=0.05)


@pytest.mark.parametrize("name", ["_render_deadline", "template_budget", "budget"])
def test_sec_45_a_template_cannot_move_its_deadline(name: str) -> None:
    source = f"{{% set {name} = 1e99 %}}" + "{% for a in range(9999) %}" * 3 + "{% endfor %}" * 3
    with pytest.raises(InvalidRequest, match="did not finish"):
        render(source, limit_s=0.05, **{name: 1e99})


@pytest.mark.parametrize(
    "source",
    [
        "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
        "{{ " + "[" * 3000 + "]" * 3000 + " }}",
        "{{ " + "not " * 5000 + "1 }}",
        "{{ a" + ".b" * 20000 + " }}",
        "{{ 1" + " | abs" * 9000 + " }}",
        "{% for a in b %}" * 30 + "{% endfor %}" * 30,  # Python nests at most 20 blocks
        "{% if a %}" * 3000 + "{% endif %}" * 3000,
        "{{ " + "9" * 100000 + " }}",
        "{{ x | nosuch }}",
        "a" * (MAX_TEMPLATE_CHARS + 1),
    ],
)
def test_sec_45_what_cannot_be_compiled_is_no_template(source: str) -> None:
    with pytest.raises(jinja2.TemplateSyntaxError) as error:
        ChatTemplate(source)
    assert error.value.message
    assert "\n" not in error.value.message


def test_a_template_that_does_not_end_is_given_up() -> None:
    many = "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3
    with pytest.raises(InvalidRequest, match=r"did not finish within 0\.05 s"):
        render(many, limit_s=0.05)


def test_the_time_limit_holds_inside_macros() -> None:
    source = (
        "{% macro f() %}{% for a in range(99999) %}{% for b in range(99999) %}"
        "{% endfor %}{% endfor %}{% endmacro %}{{ f() }}"
    )
    with pytest.raises(InvalidRequest, match="did not finish"):
        render(source, limit_s=0.05)


@pytest.mark.parametrize("source", ["{% if %}", "{{ x", "{% for x in y %}", "{% nothing %}"])
def test_what_is_no_template_is_noticed_before_it_is_used(source: str) -> None:
    with pytest.raises(jinja2.TemplateSyntaxError):
        ChatTemplate(source)


@pytest.mark.parametrize(
    ("source", "knows"),
    [
        ("{% if m.role == 'developer' %}d{% endif %}", True),
        ("{% if m.role in ['system', 'developer'] %}d{% endif %}", True),
        ("{{ m.role }} for developers", False),
        ("{# developer #}{{ m.role }}", False),
    ],
)
def test_tpl_05_whether_a_template_has_a_developer_branch(source: str, knows: bool) -> None:
    assert ChatTemplate(source).knows_developer is knows


@pytest.mark.parametrize(
    ("source", "wants"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", False),
        ("{% for part in message['content'] %}{{ part.text }}{% endfor %}", True),
        ("{% for part in message.content %}{{ part.text }}{% endfor %}", True),
        (
            "{% if content is string %}{{ content }}{% else %}"
            "{% for part in content %}{{ part.text }}{% endfor %}{% endif %}",
            False,
        ),
    ],
)
def test_tpl_06_whether_a_template_wants_lists_of_parts(source: str, wants: bool) -> None:
    assert ChatTemplate(source).wants_content_parts is wants
