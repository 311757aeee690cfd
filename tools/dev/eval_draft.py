"""Measure how many drafts of a tiny checkpoint's MTP block its main model accepts (greedy).

Prints Markdown tables: on held-out text with its own tokens, and over greedy texts of the main
model. Needs the test extra (torch, transformers). See docs/tiny_model.md.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cachegraph.models.shipped import resolve
from cachegraph.tools.dev.tiny.acceptance import accepted_in_steps, equal_on_text
from cachegraph.tools.dev.tiny.corpus import stdlib_corpus
from cachegraph.tools.dev.tiny.draft_block import DraftBlock, read_block
from cachegraph.tools.dev.tiny.draft_training import continued
from cachegraph.tools.dev.tiny.network import load_model
from cachegraph.tools.dev.tiny.tokens import BOS_ID, Ids, encode_stream, load_tokenizer

BATCH = 8


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("checkpoint", type=resolve)
    parser.add_argument("--drafts", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=256, help="length of each text")
    parser.add_argument("--prompt", type=int, default=32, help="tokens of it that are given")
    parser.add_argument("--prompts", type=int, default=128, help="greedy texts")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = load_model(args.checkpoint)
    block = read_block(model, args.checkpoint)
    stream = _held_out(args.checkpoint)
    _print_text(block, model, stream, args)
    _print_greedy(block, model, stream, args)


def _held_out(checkpoint: Path) -> Ids:
    tokenizer = load_tokenizer(checkpoint)
    return encode_stream(tokenizer, (s.text for s in stdlib_corpus().held_out))


def _print_text(block: DraftBlock, model: Any, stream: Ids, args: argparse.Namespace) -> None:
    """The whole held-out stream in pieces, every chain of drafts in it."""
    count = len(stream) // args.tokens
    pieces = torch.from_numpy(stream[: count * args.tokens].reshape(count, args.tokens))
    marks = [equal_on_text(block, model, some, args.drafts) for some in _batches(pieces)]
    equal = np.concatenate(marks).reshape(-1, args.drafts)
    print(f"Text, {len(equal)} chains: share of drafts equal to the model's choice\n")
    _print_row(*(f"draft {i + 1}" for i in range(args.drafts)))
    _print_row(*["---"] * args.drafts)
    _print_row(*(f"{share:.3f}" for share in equal.mean(0)))


def _print_greedy(
    block: DraftBlock, model: Any, stream: Ids, args: argparse.Namespace
) -> None:
    """Speculative decoding of greedy texts with 1, 2, ... drafts."""
    starts = np.linspace(0, len(stream) - args.prompt, args.prompts).astype(int)
    prompts = torch.from_numpy(np.stack([stream[s : s + args.prompt] for s in starts]))
    prompts[:, 0] = BOS_ID
    texts = torch.cat([continued(model, some, args.tokens) for some in _batches(prompts)])
    marks = [equal_on_text(block, model, some, args.drafts) for some in _batches(texts)]
    equal = np.concatenate(marks)
    print(f"\nGreedy text, {args.prompts} times {args.tokens - args.prompt} tokens\n")
    _print_row("drafts", *(f"accepted {i + 1}" for i in range(args.drafts)), "tokens a step")
    _print_row(*["---"] * (args.drafts + 2))
    for drafts in range(1, args.drafts + 1):
        steps = [accepted_in_steps(one[:, :drafts], args.prompt - 1) for one in equal]
        counts = np.concatenate(steps)
        shares = [
            f"{(counts > i).mean():.3f}" if i < drafts else "" for i in range(args.drafts)
        ]
        _print_row(drafts, *shares, f"{1 + counts.mean():.2f}")


def _batches(texts: Tensor) -> list[Tensor]:
    return [texts[start : start + BATCH] for start in range(0, len(texts), BATCH)]


def _print_row(*cells: object) -> None:
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)


if __name__ == "__main__":
    main()
