"""Templates: the conventions they are written for, their errors, and their time limit."""

from __future__ import annotations

import jinja2
import pytest

from serve.engine.chat_template import ChatTemplate
from serve.errors import InvalidRequest

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
