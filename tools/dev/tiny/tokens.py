"""Byte-level BPE of the tiny models, and texts as token arrays."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

BOS, EOS = "<bos>", "<eos>"
BOS_ID, EOS_ID = 0, 1

Ids = NDArray[np.int64]


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A BPE over bytes, with BOS and EOS as ids 0 and 1."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "add_bos_token": True,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a checkpoint."""
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def encode_file(tokenizer: Tokenizer, text: str) -> Ids:
    """BOS and the tokens of one file: int64 [n]."""
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    return np.array([BOS_ID, *ids], np.int64)


def encode_stream(tokenizer: Tokenizer, texts: Iterable[str]) -> Ids:
    """All files one after another, each from BOS to EOS: int64 [n]."""
    return np.concatenate([np.append(encode_file(tokenizer, t), EOS_ID) for t in texts])


def token_bytes(tokenizer: Tokenizer) -> Ids:
    """Bytes of text that each token stands for, 0 for BOS and EOS: int64 [vocabulary].

    A byte-level token is spelled with one character per byte.
    """
    sizes = np.zeros(tokenizer.get_vocab_size(), np.int64)
    for spelled, token in tokenizer.get_vocab().items():
        sizes[token] = 0 if token in (BOS_ID, EOS_ID) else len(spelled)
    return sizes
