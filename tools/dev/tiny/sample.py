"""Greedy text of a tiny checkpoint by transformers, to look at: `... .sample CHECKPOINT PROMPT`."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import nn

from cachegraph.tools.dev.tiny.network import load_model
from cachegraph.tools.dev.tiny.tokens import encode_file, load_tokenizer


@torch.no_grad()
def greedy(model: nn.Module, ids: list[int], count: int) -> list[int]:
    """The `count` likeliest next tokens, one at a time, each from a run over the whole text."""
    start = len(ids)
    for _ in range(count):
        logits = model(torch.tensor([ids]), use_cache=False).logits[0, -1]
        ids = [*ids, int(logits.argmax())]
    return ids[start:]


def main() -> None:
    """Print prompt and continuation."""
    parser = argparse.ArgumentParser(description="greedy text of a tiny checkpoint")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("prompt")
    parser.add_argument("--tokens", type=int, default=120)
    args = parser.parse_args()
    model, tokenizer = load_model(args.checkpoint), load_tokenizer(args.checkpoint)
    ids = encode_file(tokenizer, args.prompt).tolist()
    print(args.prompt + tokenizer.decode(greedy(model, ids, args.tokens)))


if __name__ == "__main__":
    main()
