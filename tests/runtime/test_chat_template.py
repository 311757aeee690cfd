"""Chat templates: what published templates expect of their environment, and clear refusals."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pytest

from cachegraph.models.errors import ConfigError
from cachegraph.models.shipped import resolve
from cachegraph.runtime.chat_template import ChatTemplate
from cachegraph.runtime.text import TextCodec

pytestmark = pytest.mark.r0

CHAT = [
    {"role": "system", "content": "Be <brief> & kind."},
    {"role": "user", "content": "Grüße 漢字 🙂"},
    {"role": "assistant", "content": "Hallo."},
    {"role": "user", "content": "Und?"},
]
TURNS = """{{ bos_token }}
{%- for message in messages %}
    {%- if message['role'] == 'assistant' %}
        {{- '\\n<a>' + message.content + eos_token }}
    {%- else %}
        {{- '\\n<' ~ message['role'][0] ~ '>' + message['content'] }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '\\n<a>' }}
{%- endif %}
"""


def render(source: str, **variables: object) -> str:
    return ChatTemplate(source, bos_token="<bos>", eos_token="<eos>").render(CHAT, **variables)


def test_a_conversation_is_rendered() -> None:
    """Roles, special tokens, both spellings of a field, no HTML escaping."""
    template = ChatTemplate(TURNS, bos_token="<bos>", eos_token="<eos>")
    turns = "<bos>\n<s>Be <brief> & kind.\n<u>Grüße 漢字 🙂\n<a>Hallo.<eos>\n<u>Und?"
    assert template.render(CHAT, add_generation_prompt=False) == turns
    assert template.render(CHAT) == turns + "\n<a>"
    assert template.render(CHAT) == turns + "\n<a>"


def test_block_lines_leave_no_white_space() -> None:
    """trim_blocks and lstrip_blocks: a line that holds only a block vanishes."""
    source = "A\n    {% if true %}\n  B\n    {% endif %}\nC"
    assert render(source) == "A\n  B\nC"


def test_tojson_is_plain_json() -> None:
    """Characters stay as they are, in order, and indent works."""
    value = {"z": "é🙂 <b>'&", "a": [1, None]}
    assert render("{{ x | tojson }}", x=value) == '{"z": "é🙂 <b>\'&", "a": [1, null]}'
    assert render("{{ x | tojson(indent=2) }}", x=[1]) == "[\n  1\n]"
    assert render("{{ x | tojson(separators=(',', ':'), sort_keys=true) }}", x=value) == (
        '{"a":[1,null],"z":"é🙂 <b>\'&"}'
    )


def test_strftime_now_reads_the_clock() -> None:
    """The date of today, by a clock that a caller can set."""
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", now=lambda: datetime(2026, 3, 9))
    assert template.render([]) == "09 Mar 2026"
    assert render("{{ strftime_now('%Y') }}").isdigit()


def test_break_continue_and_generation_blocks() -> None:
    """Loop controls work; a generation block is its content."""
    loop = "{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}"
    assert render(loop + "{% if i == 4 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "023"
    assert render("a{% generation %}b{{ eos_token }}{% endgeneration %}c") == "ab<eos>c"


def test_tools_and_variables_reach_the_template() -> None:
    """tools and documents are None unless given; further variables pass by name."""
    assert render("{{ tools is none }} {{ documents is none }}") == "True True"
    tools = [{"name": "f"}]
    assert (
        render("{{ tools[0].name }}{{ enable_thinking }}", tools=tools, enable_thinking=1)
        == "f1"
    )
    assert render("{{ documents }}", documents=[1]) == "[1]"


def test_a_token_that_does_not_exist_is_undefined() -> None:
    """None would be written into the prompt as a word."""
    template = ChatTemplate("[{{ bos_token }}{{ eos_token is defined }}]")
    assert template.render(CHAT) == "[False]"


def test_what_the_template_refuses_is_one_line() -> None:
    """raise_exception gives its words, on one line, with the template's name."""
    template = ChatTemplate("{{ raise_exception('only\nusers ' ~ 'here') }}", where="t.jinja")
    with pytest.raises(ConfigError, match=r"^t\.jinja: only users here$"):
        template.render(CHAT)


@pytest.mark.parametrize(
    ("source", "fact"),
    [
        ("{{ 1 / 0 }}", "ZeroDivisionError: division by zero"),
        ("{{ messages + 1 }}", "TypeError"),
        ("{{ missing.field }}", "'missing' is undefined"),
        ("{{ strftime_now(5) }}", "TypeError: "),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ raise_exception('') }}", "refused without a message"),
    ],
)
def test_errors_inside_a_template_are_one_line(source: str, fact: str) -> None:
    """Whatever a template raises becomes one ConfigError."""
    with pytest.raises(ConfigError) as caught:
        render(source)
    assert fact in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{% for i in range(10000000) %}{% endfor %}",
    ],
)
def test_a_template_cannot_leave_its_sandbox(source: str) -> None:
    """No way to Python's classes, no change of the messages, no endless range."""
    before = [dict(message) for message in CHAT]
    with pytest.raises(ConfigError):
        render(source)
    assert before == CHAT


def test_a_syntax_error_names_the_line() -> None:
    """Found when the template is made, not when it is first used."""
    with pytest.raises(ConfigError, match=r"^f\.jinja, line 2: [^\n]*mend it"):
        ChatTemplate("ok\n{% if %}", where="f.jinja")
    with pytest.raises(ConfigError, match="No filter named 'shout'"):
        ChatTemplate("{{ 'a' | shout }}")


@pytest.mark.parametrize("message", [{}, {"content": "x"}, {"role": None}])
def test_a_message_without_a_role_is_refused(message: dict[str, object]) -> None:
    """Jinja would render the hole as nothing."""
    with pytest.raises(ConfigError, match="message 1 has no role"):
        ChatTemplate(TURNS).render([CHAT[0], message])


# --- where a template comes from -------------------------------------------------------------


def test_no_template_names_both_remedies() -> None:
    """The shipped model has none: the error says what to do instead."""
    codec = TextCodec.load(resolve("tiny:deepseek_v4"))
    with pytest.raises(ConfigError, match=r"--template FILE.*`cachegraph generate`"):
        ChatTemplate.load(codec)


def test_a_file_goes_before_the_bundle(tmp_path: Path) -> None:
    """A template file replaces the bundle's; special tokens are the tokenizer's; ids round-trip."""
    shipped = TextCodec.load(resolve("tiny:deepseek_v4"))
    codec = TextCodec(
        tokenizer=shipped.tokenizer,
        bos_token="<bos>",
        eos_token="<eos>",
        adds_bos=True,
        chat_template="{{ eos_token }}bundle",
    )
    assert ChatTemplate.load(codec).render([]) == "<eos>bundle"
    path = tmp_path / "chat.jinja"
    path.write_text(TURNS, encoding="utf-8")
    text = ChatTemplate.load(codec, path).render(CHAT)
    ids = codec.encode(text, add_bos=False)
    assert (ids.count(0), ids.count(1)) == (1, 1)
    assert codec.decode(ids, skip_special=False) == text


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    """A missing file and one that is not UTF-8."""
    codec = TextCodec.load(resolve("tiny:deepseek_v4"))
    with pytest.raises(ConfigError, match=r"none\.jinja cannot be read"):
        ChatTemplate.load(codec, tmp_path / "none.jinja")
    (tmp_path / "latin.jinja").write_bytes(b"\xe9")
    with pytest.raises(ConfigError, match=r"latin\.jinja cannot be read"):
        ChatTemplate.load(codec, tmp_path / "latin.jinja")
