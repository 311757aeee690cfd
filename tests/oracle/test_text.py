"""Tokenizer and chat templates against transformers: equal ids, equal text, equal prompts."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from cachegraph.models.shipped import resolve
from cachegraph.runtime.chat_template import ChatTemplate
from cachegraph.runtime.text import TextCodec

pytestmark = pytest.mark.r3

TEXTS = ["import os\n\nclass A:\n\tpass", "naïve 🙂 漢字", "<bos>a<eos>b", " lead", ""]
# White space control, namespaces, macros, filters, loop controls, JSON: what templates use.
TEMPLATE = """{% macro turn(role, text) %}<|{{ role }}|>
{{ text | trim }}{% endmacro %}
{{ bos_token }}
  {% if tools %}
# Tools
    {% for tool in tools %}
{{ tool | tojson }}
{{ tool | tojson(indent=4) }}
    {% endfor %}
  {% endif %}
{% set state = namespace(last=none, count=0) %}
{%- for message in messages -%}
  {% if message.role == 'skip' %}{% continue %}{% endif %}
  {%- set state.count = state.count + 1 %}
{{ turn(message.role, message.content) }}
  {% generation %}
{{ loop.index0 }}{{ ' last' if loop.last }}
  {% endgeneration %}
  {% set state.last = message.role %}
{% endfor %}
{{ state.count }} {{ state.last }} {{ documents is none }} {{ mode | default('plain') }}
{% if add_generation_prompt %}<|assistant|>{{ eos_token }}{% endif %}

"""
MESSAGES = [
    {"role": "system", "content": " Be <kind> & brief. "},
    {"role": "skip", "content": "unseen"},
    {"role": "user", "content": "Grüße 🙂\n"},
]
TOOLS: list[dict[str, Any]] = [
    {"name": "f", "note": "é <x>'&", "args": {"b": 1, "a": [None, True]}}
]


@pytest.fixture(scope="module")
def theirs() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(resolve("tiny:deepseek_v4"))


@pytest.mark.parametrize("text", TEXTS)
def test_ids_and_text_are_equal(theirs: PreTrainedTokenizerFast, text: str) -> None:
    """Encoding without bos, and decoding with and without special tokens."""
    ours = TextCodec.load(resolve("tiny:deepseek_v4"))
    ids = ours.encode(text, add_bos=False)
    assert ids == theirs(text, add_special_tokens=False)["input_ids"]
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.decode(ids, skip_special=False) == theirs.decode(ids)


@pytest.mark.parametrize("prompted", [True, False])
@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("extra", [{}, {"mode": "thinking"}])
def test_prompts_are_equal(
    theirs: PreTrainedTokenizerFast,
    prompted: bool,
    tools: list[dict[str, Any]] | None,
    extra: dict[str, str],
) -> None:
    """One template that uses most of what published ones use."""
    wanted = theirs.apply_chat_template(
        MESSAGES,
        chat_template=TEMPLATE,
        tools=tools,
        tokenize=False,
        add_generation_prompt=prompted,
        **extra,
    )
    ours = ChatTemplate(TEMPLATE, bos_token="<bos>", eos_token="<eos>")
    text = ours.render(MESSAGES, tools=tools, add_generation_prompt=prompted, **extra)
    assert text == wanted
