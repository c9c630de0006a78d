"""Chat templates render as transformers renders them, in a sandbox that is as tight."""

from __future__ import annotations

import enum
import inspect
from typing import Any

import pytest
from jinja2 import TemplateError, TemplateSyntaxError
from jinja2.exceptions import SecurityError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from sagellm.engines.embedded import embedded_model
from sagellm.engines.testing.tokenizers import CHAT_TEMPLATE
from sagellm.engines.text.jinja_templates import render_chat
from sagellm.engines.text.plain_chats import render_plain_chat
from sagellm.engines.text.tokenizer import TEMPLATE_ARGUMENTS

MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": 'Be <brief> & "kind" — é船'},
    {"role": "user", "content": "  What?\n", "name": None},
    {"role": "assistant", "content": "It is."},
]


class Mood(enum.StrEnum):
    GRAVE = "grave"


VARIABLES: dict[str, Any] = {
    "bos_token": "<s>",
    "flags": {"deep": [1, 2.5, None, True, ("a", "b")], 3: "three"},
    "mood": Mood.GRAVE,
    "odd": object,
}
TEMPLATES = (
    CHAT_TEMPLATE,
    (embedded_model() / "chat_template.jinja").read_text(),
    "{{ bos_token }}{% for m in messages %}\n  {% if loop.first %}\n{% continue %}\n  {% endif %}\n"
    "{{ m.role }}|{{ m.content | trim }}\n{% if m.role == 'user' %}{% break %}{% endif %}\n{% endfor %}\n",
    "{{ messages | tojson }}{{ flags | tojson(indent=2) }}{{ flags.deep | tojson(true) }}"
    "{{ {'b': 1, 'a': '<é>'} | tojson(separators=(',', ':'), sort_keys=true) }}",
    "{%- for m in messages %}{% generation %}{% set x = 1 %}{{ m.content }}{% endgeneration %}{% endfor %}"
    "{{ x }}",
    "{% set ns = namespace(found=false, self='a') %}{% for m in messages %}{% if m.name is defined %}"
    "{% set ns.found = true %}{% endif %}{% endfor %}{{ ns.found }}{{ ns.self }}",
    "{{ dict(a=1, b=[2]) }}{{ dict.fromkeys(['x'], 0) }}{{ range(3) | list }}{{ tools }}{{ documents }}",
    "{{ strftime_now('%Y') | length }}{{ add_generation_prompt }}{{ mood }}{{ odd }}"
    "{{ mood.name }}{{ missing }}",
    "{% macro say(x) %}[{{ x }}]{% endmacro %}{{ say(messages[0]['content']) }}"
    "{{ messages[-1].content[::-1] }}",
    "{{ raise_exception('roles must alternate') }}",
    "{{ missing.field }}",
    "{% for %}",
    "{{ 1 / 0 }}",
    "{{ ''.__class__.__mro__ }}",
    "{{ messages.append(1) }}",
    "{{ namespace(_a=1) }}",
    "{% set ns = namespace() %}{% set ns._a = 1 %}",
    "{{ dict.__class__ }}{{ namespace.__init__ }}",
    "{{ (messages | map(attribute='__class__') | list) }}",
    "{{ '%s' | format(messages[0].content) }}{{ '{0.__class__}'.format(1) }}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ self.__init__ }}",
)


def outcome(render: Any) -> Any:
    """Return a rendered text, or the kind of error and what a template itself says."""
    try:
        return render()
    except Exception as error:
        return type(error), str(error) if type(error) is TemplateError else None


@pytest.mark.parametrize("source", TEMPLATES)
@pytest.mark.parametrize("is_opened", [True, False])
def test_a_template_renders_as_transformers_renders_it(source, is_opened):
    own = outcome(lambda: render_chat(source, MESSAGES, VARIABLES, add_generation_prompt=is_opened))
    present = [{key: value for key, value in each.items() if value is not None} for each in MESSAGES]
    theirs = outcome(
        lambda: render_jinja_template(
            [present], chat_template=source, add_generation_prompt=is_opened, **VARIABLES
        )[0][0]
    )
    assert own == theirs


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        ("{{ ''.__class__.__mro__ }}", SecurityError),
        ("{{ messages.append(1) }}", SecurityError),
        ("{{ namespace(_a=1) }}", SecurityError),
        ("{% set ns = namespace() %}{% set ns.__class__ = 1 %}", SecurityError),
        ("{{ range(10 ** 9) }}", OverflowError),
        ("{% include 'secret' %}", TypeError),
        ("{% import 'os' as os %}", TypeError),
        ("{% for %}", TemplateSyntaxError),
    ],
)
def test_a_template_reaches_neither_python_nor_files(source, kind):
    with pytest.raises(kind):
        render_chat(source, MESSAGES, {}, add_generation_prompt=True)


def test_a_template_cannot_change_the_callers_values():
    values = {"flags": {"a": [1]}}
    with pytest.raises(SecurityError):
        render_chat("{{ flags.update({'b': 1}) }}", MESSAGES, values, add_generation_prompt=True)
    assert values == {"flags": {"a": [1]}}


def test_no_messages_are_refused():
    with pytest.raises(ValueError, match="empty conversation"):
        render_chat(CHAT_TEMPLATE, [], {}, add_generation_prompt=True)


def test_the_arguments_that_no_request_can_set_are_those_of_transformers():
    parameters = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
    assert parameters.keys() - {"self"} <= TEMPLATE_ARGUMENTS


@pytest.mark.parametrize("opens_turn", [False, True])
def test_plain_conversations_with_the_embedded_model_look_the_same_without_jinja(opens_turn):
    source = (embedded_model() / "chat_template.jinja").read_text(encoding="utf-8")
    conversations = [
        [{"role": "user", "content": "What is a KV cache?"}],
        [
            {"role": "system", "content": "  a\n"},
            {"role": "{{ 1 }}", "content": ""},
            {"role": "", "content": "<é>"},
        ],
    ]
    for messages in conversations:
        plain = render_plain_chat(source, messages, add_generation_prompt=opens_turn)
        assert plain == render_chat(source, messages, {}, add_generation_prompt=opens_turn)


def test_only_plain_messages_and_known_templates_are_rendered_without_jinja():
    source = (embedded_model() / "chat_template.jinja").read_text(encoding="utf-8")
    plain = {"role": "user", "content": "a"}
    for other in ([], [{"role": "user"}], [plain | {"tool_calls": []}], [plain | {"content": 1}]):
        assert render_plain_chat(source, other, add_generation_prompt=True) is None
    assert render_plain_chat(source + " ", [plain], add_generation_prompt=True) is None
