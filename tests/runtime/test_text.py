"""Text: loading a tokenizer, encoding, streaming without half characters, stop strings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from cachegraph.models.errors import BatchError, ConfigError, ContractError
from cachegraph.models.shipped import resolve
from cachegraph.runtime.text import StopMatcher, TextCodec

pytestmark = pytest.mark.r0

# Four-byte emoji, a joined family, flags, CJK, Arabic, combining marks, an astral letter.
TEXTS = [
    "def f(x):\n    return x + 1\n",
    "🙂👩‍👩‍👧‍👦🇳🇱",
    "漢字とかな, 한국어",
    "e\u0301a\u0308\u0323 ﷺ مرحبا",
    "𝔘 a🙂b 𐍈\t\r\n \u00a0\u200d",
    "",
]


def byte_tokenizer() -> Tokenizer:
    """Byte-level: one token for each byte, a few merged ones, and added tokens of every kind."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: i for i, character in enumerate(alphabet)}
    merges = [("h", "e"), ("Ł", "ĵ"), ("ð", "Ł")]  # the last two: bytes 9F 99 and F0 9F
    for left, right in merges:
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<s>"), AddedToken("<｜end｜>")])
    tokenizer.add_tokens([AddedToken("<think>"), AddedToken("two words é")])
    return tokenizer


def sentencepiece_tokenizer() -> Tokenizer:
    """Metaspace with byte fallback: a decoder that treats the first token differently."""
    pieces = ["<unk>", "▁", "h", "i", "▁hi", "▁the"] + [f"<0x{i:02X}>" for i in range(256)]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={piece: i for i, piece in enumerate(pieces)},
            merges=[],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken("<s>")])
    return tokenizer


def write_folder(
    folder: Path, tokenizer: Tokenizer, config: dict[str, object] | None = None
) -> Path:
    tokenizer.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


BYTES = TextCodec(tokenizer=byte_tokenizer())
PIECES = TextCodec(tokenizer=sentencepiece_tokenizer())


@pytest.fixture(scope="module")
def shipped() -> TextCodec:
    return TextCodec.load(resolve("tiny:deepseek_v4"))


# --- loading ---------------------------------------------------------------------------------


def test_the_shipped_tokenizer_loads(shipped: TextCodec) -> None:
    """Special tokens and sizes are those of its files."""
    assert (shipped.bos_token, shipped.bos_id) == ("<bos>", 0)
    assert (shipped.eos_token, shipped.eos_id) == ("<eos>", 1)
    assert shipped.vocab_size == 1024
    assert shipped.adds_bos
    assert shipped.chat_template is None


def test_a_missing_tokenizer_names_the_remedy(tmp_path: Path) -> None:
    """Without tokenizer.json the error says where it looked and that ids still work."""
    with pytest.raises(ContractError, match=r"no tokenizer\.json .*pass token ids"):
        TextCodec.load(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", [b"{", b"[1]", b"\xff\xfe"])
def test_damaged_files_are_named(tmp_path: Path, name: str, content: bytes) -> None:
    """Broken JSON, another type and broken UTF-8 become one error with the file's name."""
    write_folder(tmp_path, byte_tokenizer(), {})
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ContractError, match=name):
        TextCodec.load(tmp_path)


def test_a_bos_outside_the_vocabulary_is_refused(tmp_path: Path) -> None:
    """Files of two models do not load together."""
    write_folder(tmp_path, byte_tokenizer(), {"bos_token": "<start>"})
    with pytest.raises(ContractError, match=r"bos_token '<start>' is not in the vocabulary"):
        TextCodec.load(tmp_path)


def test_special_tokens_may_be_objects(tmp_path: Path) -> None:
    """Both spellings of tokenizer_config.json are read; null and absent mean none."""
    config = {"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": None}
    codec = TextCodec.load(write_folder(tmp_path, byte_tokenizer(), config))
    assert codec.bos_token == "<s>"
    assert codec.eos_token is None
    assert codec.eos_id is None


def test_a_lone_tokenizer_json_is_enough(tmp_path: Path) -> None:
    """Without tokenizer_config.json there is no bos, and text still goes both ways."""
    codec = TextCodec.load(write_folder(tmp_path, byte_tokenizer()))
    assert codec.bos_id is None
    assert codec.decode(codec.encode("hé 🙂")) == "hé 🙂"


def test_saved_truncation_and_padding_are_off(tmp_path: Path) -> None:
    """A tokenizer.json saved in training may cut at 4 tokens or pad to 9: a prompt is whole."""
    tokenizer = byte_tokenizer()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=9)
    codec = TextCodec.load(write_folder(tmp_path, tokenizer))
    assert codec.decode(codec.encode("0123456789")) == "0123456789"
    assert len(codec.encode("ab")) == 2


def test_chat_template_sources(tmp_path: Path) -> None:
    """A jinja file wins over the config; a list gives its default; else there is none."""

    def template(config: dict[str, object]) -> str | None:
        return TextCodec.load(write_folder(tmp_path, byte_tokenizer(), config)).chat_template

    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    assert template({}) is None
    assert template({"chat_template": "S"}) == "S"
    assert template({"chat_template": named}) == "D"
    assert template({"chat_template": named[:1]}) is None
    (tmp_path / "chat_template.jinja").write_text("é", encoding="utf-8")
    assert template({"chat_template": "S"}) == "é"


# --- encoding --------------------------------------------------------------------------------


def test_bos_follows_the_config_unless_said(shipped: TextCodec) -> None:
    """add_bos None, True and False; a text that begins with bos gets no second one by itself."""
    plain = shipped.encode("import os", add_bos=False)
    assert 0 not in plain
    assert shipped.encode("import os") == [0, *plain]
    assert shipped.encode("import os", add_bos=True) == [0, *plain]
    assert shipped.encode("<bos>import os") == [0, *plain]
    assert shipped.encode("") == [0]


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ({"bos_token": "<s>"}, True),
        ({"bos_token": "<s>", "add_bos_token": False}, False),
        ({"add_bos_token": True}, False),
        ({"bos_token": "<｜end｜>"}, False),
    ],
)
def test_a_post_processor_decides_where_the_config_is_silent(
    tmp_path: Path, config: dict[str, object], wanted: bool
) -> None:
    """A template that puts bos first counts as add_bos_token, unless the config says otherwise."""
    tokenizer = byte_tokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    codec = TextCodec.load(write_folder(tmp_path, tokenizer, config))
    ids = codec.encode("he")
    assert codec.adds_bos is wanted
    assert len(ids) == (2 if wanted else 1)


def test_asking_for_a_bos_that_is_not_there_is_an_error() -> None:
    """add_bos=True without a bos token is refused, not ignored."""
    with pytest.raises(ConfigError, match="no bos_token"):
        BYTES.encode("x", add_bos=True)


def test_a_lone_surrogate_is_refused() -> None:
    """A command line in a broken encoding gives half pairs; the place is named."""
    with pytest.raises(BatchError, match="character 2"):
        BYTES.encode("ab\ud83d")


def test_negative_ids_cannot_be_decoded(shipped: TextCodec) -> None:
    """-1 is an error; ids beyond the tokenizer (a padded vocabulary) have no text."""
    with pytest.raises(BatchError, match="token id -1"):
        shipped.decode([3, -1])
    assert shipped.decode([5000]) == ""
    assert shipped.stream().push(5000) == ""


def test_special_tokens_are_left_out_unless_wanted() -> None:
    """skip_special drops special tokens only; other added tokens are text."""
    ids = BYTES.encode("<s>he<think>two words é<｜end｜>")
    assert BYTES.decode(ids) == "he<think>two words é"
    assert BYTES.decode(ids, skip_special=False) == "<s>he<think>two words é<｜end｜>"


# --- streaming -------------------------------------------------------------------------------


def pieces_of(codec: TextCodec, ids: list[int], *, skip_special: bool = True) -> list[str]:
    decoder = codec.stream(skip_special=skip_special)
    return [*(decoder.push(token) for token in ids), decoder.finish()]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("codec", [BYTES, PIECES], ids=["bytes", "pieces"])
def test_pieces_join_to_the_text(codec: TextCodec, text: str) -> None:
    """Whole characters only, each as soon as it is complete, and nothing is lost."""
    ids = codec.encode(text)
    pieces = pieces_of(codec, ids)
    assert "".join(pieces) == codec.decode(ids) == text
    assert not any("\ufffd" in piece for piece in pieces)
    assert pieces[-1] == ""


def test_the_shipped_tokenizer_streams(shipped: TextCodec) -> None:
    """Its merges cut characters anywhere."""
    text = "".join(TEXTS)
    ids = shipped.encode(text)
    pieces = pieces_of(shipped, ids)
    assert "".join(pieces) == text
    assert "\ufffd" not in "".join(pieces)


def test_a_character_comes_out_with_its_last_byte() -> None:
    """An emoji of four single bytes: three empty pieces, then the character; its tail ASCII too."""
    ids = [BYTES.tokenizer.token_to_id(character) for character in "ðŁĻĤ"]
    assert pieces_of(BYTES, ids) == ["", "", "", "🙂", ""]
    merged = BYTES.encode("h🙂")
    assert len(merged) < 5
    assert "".join(pieces_of(BYTES, merged)) == "h🙂"


@pytest.mark.parametrize(
    ("codec", "token"), [(BYTES, "ð"), (PIECES, "<0xF0>")], ids=["bytes", "pieces"]
)
def test_an_unfinished_character_is_flushed_as_replacement(
    codec: TextCodec, token: str
) -> None:
    """Generation may stop inside a character: U+FFFD at the end, not before, and once."""
    decoder = codec.stream()
    half = codec.tokenizer.token_to_id(token)
    start = codec.encode("hi")
    assert "".join(decoder.push(part) for part in start) == "hi"
    assert decoder.push(half) == ""
    assert decoder.finish() == "\ufffd"
    assert decoder.finish() == ""


@pytest.mark.parametrize("broken", range(12, 18))
def test_a_character_behind_broken_bytes_stays_whole(broken: int) -> None:
    """However many stray bytes come first, the emoji after them is one piece."""
    ids = [BYTES.tokenizer.token_to_id(character) for character in "Ģ" * broken + "ðŁĻĤ"]
    assert pieces_of(BYTES, ids) == ["\ufffd"] * broken + ["", "", "", "🙂", ""]


@settings(derandomize=True, deadline=None, max_examples=150)
@given(ids=st.lists(st.integers(0, 270), max_size=40), skip_special=st.booleans())
def test_any_ids_stream_to_what_decode_gives(ids: list[int], skip_special: bool) -> None:
    """Also broken bytes, added tokens and ids without a token: the join is exact."""
    whole = BYTES.decode(ids, skip_special=skip_special)
    assert "".join(pieces_of(BYTES, ids, skip_special=skip_special)) == whole


@settings(derandomize=True, deadline=None, max_examples=80)
@given(
    text=st.text(
        st.characters(exclude_categories=["Cs"], exclude_characters="▁ "), max_size=30
    )
)
def test_any_text_streams_through_the_window(text: str) -> None:
    """Valid text through a decoder with byte fallback comes out whole."""
    ids = PIECES.encode(text)
    assert "".join(pieces_of(PIECES, ids)) == PIECES.decode(ids)


def test_the_first_space_only_is_stripped() -> None:
    """A decoder that strips a leading space does so once, also behind silent tokens."""
    hi = PIECES.tokenizer.token_to_id("▁hi")
    silent = PIECES.tokenizer.token_to_id("<s>")
    space = PIECES.tokenizer.token_to_id("▁")
    assert pieces_of(PIECES, [space, space, hi]) == ["", " ", " hi", ""]
    assert pieces_of(PIECES, [hi, hi, *[silent] * 40, hi]) == [
        "hi",
        " hi",
        *[""] * 40,
        " hi",
        "",
    ]


class CountingTokenizer:
    """Counts the tokens that pass through decode."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.decoder = tokenizer.decoder
        self.decoded = 0

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        self.decoded += len(ids)
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)


@pytest.mark.parametrize("token", ["▁hi", "<0x80>", "<s>"])
def test_streaming_is_linear(token: str) -> None:
    """Text, endless broken bytes and silent tokens: the work for each token is bounded."""
    spy = CountingTokenizer(PIECES.tokenizer)
    codec = TextCodec(tokenizer=spy)  # type: ignore[arg-type]
    pieces_of(codec, [PIECES.tokenizer.token_to_id(token)] * 1000)
    assert spy.decoded < 1000 * 50


# --- stop strings ----------------------------------------------------------------------------


def stopped(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    matcher = StopMatcher(stops)
    text = "".join(matcher.push(piece) for piece in pieces)
    return text + matcher.finish(), matcher.matched


def naive(stops: list[str], text: str) -> tuple[str, str | None]:
    """Character by character: the first end of a stop string, the longest one there."""
    for end in range(1, len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            longest = max(hits, key=len)
            return text[: end - len(longest)], longest
    return text, None


def test_a_stop_string_across_pieces_is_cut() -> None:
    """The pieces before a match come out, the stop string and the rest do not."""
    matcher = StopMatcher(["\n\nUser:"])
    assert matcher.push("Hello\n") == "Hello"
    assert matcher.push("\nUs") == ""
    assert matcher.matched is None
    assert matcher.push("er: and more") == ""
    assert matcher.matched == "\n\nUser:"
    assert matcher.push("text") == ""
    assert matcher.finish() == ""


def test_a_false_start_is_released() -> None:
    """What turns out not to be a stop string comes out, at the latest at the end."""
    matcher = StopMatcher(["abc"])
    assert matcher.push("xab") == "x"
    assert matcher.push("ab") == "ab"
    assert matcher.push("d") == "abd"
    assert matcher.push("a") == ""
    assert matcher.finish() == "a"
    assert matcher.finish() == ""
    assert matcher.matched is None


def test_without_stop_strings_nothing_is_held() -> None:
    """Each piece passes at once."""
    matcher = StopMatcher()
    assert [matcher.push("a"), matcher.push(""), matcher.finish()] == ["a", "", ""]


def test_one_string_is_one_stop() -> None:
    """A bare string is not taken apart into letters."""
    matcher = StopMatcher("END")
    assert matcher.push("E N D THE END.") == "E N D THE "
    assert matcher.matched == "END"


def test_an_empty_stop_string_is_refused() -> None:
    """It would end every text before it began."""
    with pytest.raises(ConfigError, match="empty"):
        StopMatcher(["x", ""])


LETTERS = st.text("ab", min_size=1, max_size=4)


@settings(derandomize=True, deadline=None, max_examples=150)
@given(stops=st.lists(LETTERS, max_size=3), pieces=st.lists(st.text("abc", max_size=5)))
def test_stops_do_not_depend_on_the_pieces(stops: list[str], pieces: list[str]) -> None:
    """Any cut of a text gives what a scan by characters gives; overlaps and prefixes included."""
    assert stopped(stops, pieces) == naive(stops, "".join(pieces))


@settings(derandomize=True, deadline=None, max_examples=80)
@given(
    stops=st.lists(LETTERS, min_size=1, max_size=3),
    pieces=st.lists(st.text("abc", max_size=5)),
)
def test_no_more_is_held_than_a_stop_string_may_need(
    stops: list[str], pieces: list[str]
) -> None:
    """What is held back is the beginning of a stop string, never more."""
    matcher = StopMatcher(stops)
    given_out = "".join(matcher.push(piece) for piece in pieces)
    held = "".join(pieces)[len(given_out) :]
    if matcher.matched is None:
        assert not held or any(stop.startswith(held) and stop != held for stop in stops)


def test_stops_work_behind_a_stream(shipped: TextCodec) -> None:
    """Decoder and matcher in a row, as a generation loop uses them."""
    ids = shipped.encode("x = 1  # 🙂\nprint(x)\n", add_bos=False)
    decoder, matcher = shipped.stream(), StopMatcher(["\nprint"])
    text = "".join(matcher.push(decoder.push(token)) for token in ids)
    text += matcher.push(decoder.finish()) + matcher.finish()
    assert text == "x = 1  # 🙂"
