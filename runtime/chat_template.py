"""Chat templates: from messages to the text a model was trained to continue.

Owns the jinja environment in which published templates are written to run. It is a sandbox whose
objects cannot be changed, since a template is a program that came with a download. Knows nothing
of token ids: encode the rendered text with add_bos=False, the template writes bos itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from cachegraph.models.errors import ConfigError
from cachegraph.runtime.text import TextCodec

Message = Mapping[str, object]


class ChatTemplate:
    """One compiled template.

    where names it in errors. A special token that is None stays undefined in the template. now is
    the clock behind `strftime_now`. Raises ConfigError with the line of a syntax error.
    """

    def __init__(
        self,
        source: str,
        *,
        bos_token: str | None = None,
        eos_token: str | None = None,
        where: str = "chat template",
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._tokens = {name: text for name, text in tokens.items() if text is not None}
        self._where = where
        try:
            self._template = _environment(now).from_string(source)
        except TemplateSyntaxError as error:
            raise ConfigError(
                f"{where}, line {error.lineno}: {_one_line(error)}; mend it or pass another"
            ) from error

    @classmethod
    def load(cls, codec: TextCodec, file: Path | str | None = None) -> ChatTemplate:
        """The template in a file, else the one that came with the tokenizer.

        Raises ConfigError where there is none, saying what to do, or the file cannot be read.
        """
        if file is None:
            source, where = codec.chat_template, "the tokenizer's chat template"
        else:
            source, where = _read(Path(file)), str(file)
        if source is None:
            raise ConfigError(
                "this bundle has no chat template; pass one with --template FILE, "
                "or continue plain text with `cachegraph generate`"
            )
        return cls(source, bos_token=codec.bos_token, eos_token=codec.eos_token, where=where)

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, object]] | None = None,
        **variables: object,
    ) -> str:
        """The prompt text of a conversation.

        add_generation_prompt ends it where the assistant's answer begins. tools and any further
        variables (such as enable_thinking) mean what the template makes of them. Raises ConfigError
        for a message without a role and for whatever goes wrong inside the template.
        """
        for number, message in enumerate(messages):
            if not isinstance(message.get("role"), str):
                raise ConfigError(
                    f"message {number} has no role; each needs one (system, user or assistant)"
                )
        context = {
            "documents": None,
            **self._tokens,
            **variables,
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._template.render(context)
        except Exception as error:  # a template is a foreign program and may raise anything
            raise ConfigError(f"{self._where}: {_one_line(error)}") from error


class _GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's words for training; here it is only its content."""

    tags = {"generation"}  # noqa: RUF012  (the base class declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment(now: Callable[[], datetime]) -> ImmutableSandboxedEnvironment:
    """The environment that published templates expect."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[LoopControlExtension, _GenerationBlock],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: now().strftime(form)
    return environment


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: jinja's own filter escapes for HTML, which no model was trained on."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _one_line(error: Exception) -> str:
    """The message without line breaks; the type leads where it is not jinja's own."""
    text = " ".join(str(error).split())
    if isinstance(error, TemplateError):
        return text or "refused without a message"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"template {path} cannot be read: {error}") from error
