"""Text: from characters to token ids, and from ids back to characters as they arrive.

`TextCodec` reads a folder's tokenizer.json and tokenizer_config.json. A `StreamDecoder` turns
ids into text one by one and never gives out half a character; a `StopMatcher` behind it holds
back what may be the beginning of a stop string. A generation loop pushes each piece through
both and calls `finish` on both at the end. Knows nothing of graphs, sampling or how templates
are rendered.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tokenizers import Tokenizer, decoders

from cachegraph.models.errors import BatchError, ConfigError, ContractError

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_MAX_HELD_TOKENS = 16  # longer than any character; a run of broken bytes is let go after it


@dataclass(frozen=True, kw_only=True, slots=True)
class TextCodec:
    """A tokenizer and what its folder says about special tokens and chat.

    adds_bos is what `encode` does where the caller does not say. chat_template is the source
    of the default jinja template, or None.
    """

    tokenizer: Tokenizer
    bos_token: str | None = None
    eos_token: str | None = None
    adds_bos: bool = False
    chat_template: str | None = None

    @classmethod
    def load(cls, folder: Path | str) -> TextCodec:
        """Read tokenizer.json, tokenizer_config.json and chat_template.jinja of a folder.

        Only the first must exist. Raises ContractError where it does not, where a file cannot
        be read, or where bos or eos is not in the vocabulary.
        """
        root = Path(folder)
        tokenizer = _load_tokenizer(root / "tokenizer.json")
        config = _load_config(root / "tokenizer_config.json")
        bos, eos = _token_text(config.get("bos_token")), _token_text(config.get("eos_token"))
        for name, token in (("bos_token", bos), ("eos_token", eos)):
            if token is not None and tokenizer.token_to_id(token) is None:
                raise ContractError(
                    f"{root / 'tokenizer_config.json'}: {name} {token!r} is not in the "
                    "vocabulary of tokenizer.json; the two files are of different models"
                )
        adds_bos = config.get("add_bos_token")
        if not isinstance(adds_bos, bool):
            adds_bos = bos is not None and tokenizer.encode("").tokens[:1] == [bos]
        return cls(
            tokenizer=tokenizer,
            bos_token=bos,
            eos_token=eos,
            adds_bos=adds_bos and bos is not None,
            chat_template=_chat_template(root, config),
        )

    @property
    def bos_id(self) -> int | None:
        """Id of the token that begins a text."""
        return None if self.bos_token is None else self.tokenizer.token_to_id(self.bos_token)

    @property
    def eos_id(self) -> int | None:
        """Id of the token that ends a text."""
        return None if self.eos_token is None else self.tokenizer.token_to_id(self.eos_token)

    @property
    def vocab_size(self) -> int:
        """Tokens known here, added ones counted; a model's vocabulary may be padded beyond."""
        return int(self.tokenizer.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, *, add_bos: bool | None = None) -> list[int]:
        """Token ids of a text; special tokens spelled in it become their ids.

        add_bos None follows the tokenizer's config and adds no second bos to a text that
        begins with one. Raises ConfigError for add_bos without a bos token, BatchError for text
        that is not valid Unicode.
        """
        if add_bos and self.bos_token is None:
            raise ConfigError("add_bos: this tokenizer names no bos_token; pass add_bos=False")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise BatchError(
                f"the text holds half a surrogate pair at character {error.start}; "
                "pass text that was decoded as UTF-8"
            ) from error
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        bos_id = self.bos_id
        if add_bos is None:
            add_bos = self.adds_bos and ids[:1] != [bos_id]
        return [bos_id, *ids] if add_bos and bos_id is not None else ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of ids; broken UTF-8 becomes U+FFFD, ids beyond the tokenizer become nothing.

        Raises BatchError for a negative id.
        """
        whole = [int(token) for token in ids]
        if min(whole, default=0) < 0:
            raise BatchError(f"token id {min(whole)} cannot be decoded; ids are 0 or more")
        return self.tokenizer.decode(whole, skip_special_tokens=skip_special)

    def stream(self, *, skip_special: bool = True) -> StreamDecoder:
        """A decoder for one sequence; all its pieces joined are `decode` of all its ids."""
        if isinstance(self.tokenizer.decoder, decoders.ByteLevel):
            return _ByteStream(self.tokenizer, skip_special)
        return _WindowStream(self.tokenizer, skip_special)


class StreamDecoder(Protocol):
    """Turns the ids of one sequence into text, in time linear in their number."""

    def push(self, token: int) -> str:
        """The text that this id completes; empty while a character is unfinished."""

    def finish(self) -> str:
        """What is still held back; an unfinished character comes out as U+FFFD."""


class _ByteStream:
    """Byte-level tokenizers: each token is a run of bytes, so UTF-8 is decoded as it comes.

    Exact for any ids, also for those of broken text.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._skipped = _special_ids(tokenizer) if skip_special else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        text = None if token in self._skipped else self._tokenizer.id_to_token(token)
        return "" if text is None else self._utf8.decode(_token_bytes(text))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class _WindowStream:
    """Other tokenizers: decode the tokens held back, behind those given out last.

    The latter are there because a decoder may treat the first token of a text differently.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._given: list[int] = []
        self._held: list[int] = []

    def push(self, token: int) -> str:
        self._held.append(token)
        text = self._held_text()
        is_open = not text or text.endswith(_REPLACEMENT)
        if is_open and len(self._held) < _MAX_HELD_TOKENS:
            return ""
        if text:
            self._given = self._held
        self._held = []
        return text

    def finish(self) -> str:
        text = self._held_text() if self._held else ""
        self._held = []
        return text

    def _held_text(self) -> str:
        skip = self._skip_special
        given = self._tokenizer.decode(self._given, skip_special_tokens=skip)
        both = self._tokenizer.decode(self._given + self._held, skip_special_tokens=skip)
        return both[len(given) :]


class StopMatcher:
    """Passes text through until a stop string appears in it, however it is cut into pieces.

    The stop string that is complete first wins, of those that end together the longest;
    neither it nor anything after it comes out. ConfigError for an empty stop string.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._stops = (stops,) if isinstance(stops, str) else tuple(stops)
        if "" in self._stops:
            raise ConfigError("a stop string is empty and would end every text; leave it out")
        self._held = ""
        self._matched: str | None = None

    @property
    def matched(self) -> str | None:
        """The stop string that was found."""
        return self._matched

    def push(self, text: str) -> str:
        """The text that is certain to stand before any stop string; empty after a match."""
        if self._matched is not None:
            return ""
        text = self._held + text
        found = [(text.find(stop) + len(stop), -len(stop), stop) for stop in self._stops]
        ends = [entry for entry in found if entry[2] in text]
        if ends:
            end, negative_length, self._matched = min(ends)
            self._held = ""
            return text[: end + negative_length]
        keep = len(text) - self._open_length(text)
        self._held = text[keep:]
        return text[:keep]

    def finish(self) -> str:
        """What was held back for a stop string that never came."""
        text, self._held = self._held, ""
        return text

    def _open_length(self, text: str) -> int:
        """Length of the longest end of the text that a stop string begins with."""
        longest = max(map(len, self._stops), default=0)
        for length in range(min(longest, len(text)), 0, -1):
            end = text[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0


def _load_tokenizer(path: Path) -> Tokenizer:
    if not path.is_file():
        raise ContractError(
            f"no {path.name} in {path.parent}; text needs one: copy it from the checkpoint, "
            "or pass token ids instead of text"
        )
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises no narrower type
        raise ContractError(
            f"{path} cannot be read as a tokenizer: {error}; copy it from the checkpoint again"
        ) from error
    # Saved settings of a training run would cut or pad prompts without a word.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _load_config(path: Path) -> dict[str, object]:
    if not path.is_file():
        return {}
    try:
        config = json.loads(_read(path))
    except json.JSONDecodeError as error:
        raise ContractError(f"{path} is not JSON: {error}; copy it again") from error
    if not isinstance(config, dict):
        raise ContractError(f"{path} holds a {type(config).__name__}; it must be an object")
    return config


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ContractError(f"{path} is not UTF-8: {error}; copy it again") from error


def _token_text(entry: object) -> str | None:
    """A special token of tokenizer_config.json, written as a string or as an object."""
    if isinstance(entry, dict):
        entry = entry.get("content")
    return entry if isinstance(entry, str) else None


def _chat_template(root: Path, config: dict[str, object]) -> str | None:
    """chat_template.jinja, else the config's template, else the default of its list."""
    path = root / "chat_template.jinja"
    if path.is_file():
        return _read(path)
    entry = config.get("chat_template")
    if isinstance(entry, list):
        items = [item for item in entry if isinstance(item, dict)]
        entry = {item.get("name"): item.get("template") for item in items}.get("default")
    return entry if isinstance(entry, str) else None


def _special_ids(tokenizer: Tokenizer) -> frozenset[int]:
    added = tokenizer.get_added_tokens_decoder()
    return frozenset(token for token, entry in added.items() if entry.special)


def _byte_alphabet() -> dict[str, int]:
    """The 256 characters in which byte-level vocabularies spell bytes.

    Printable Latin-1 stands for itself, the others count up from U+0100.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    shifted = {chr(0x100 + i): byte for i, byte in enumerate(others)}
    return {chr(byte): byte for byte in printable} | shifted


_BYTE_OF = _byte_alphabet()


def _token_bytes(token: str) -> bytes:
    """Bytes of a byte-level token; an added token outside the alphabet is its own text."""
    try:
        return bytes(_BYTE_OF[character] for character in token)
    except KeyError:
        return token.encode("utf-8")
