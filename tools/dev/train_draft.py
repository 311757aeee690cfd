"""Train the draft (MTP) block of a tiny DeepSeek-V4 and write the checkpoint with it.

Needs the test extra (torch, transformers). The main model stays as it is. With `--steps` a run
is reproducible on one machine and number of threads; with `--minutes` it fits a time. See
docs/tiny_model.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch

from cachegraph.models.shipped import resolve
from cachegraph.tools.dev.tiny.corpus import stdlib_corpus
from cachegraph.tools.dev.tiny.draft_block import (
    DraftBlock,
    start_from_main,
    write_block,
)
from cachegraph.tools.dev.tiny.draft_training import DraftRecipe, DraftRow, train_block
from cachegraph.tools.dev.tiny.network import load_model
from cachegraph.tools.dev.tiny.schedule import Budget
from cachegraph.tools.dev.tiny.tokens import encode_stream, load_tokenizer

DEFAULT_STEPS = 1100
SAVE_EVERY, SAY_EVERY = 100, 10


def main() -> None:
    """Parse the command line, train, write checkpoint and log."""
    args = _parser().parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    if args.checkpoint.resolve() != args.out.resolve():
        shutil.copytree(args.checkpoint, args.out, dirs_exist_ok=True)
    model = load_model(args.out).requires_grad_(False)
    tokenizer = load_tokenizer(args.out)
    stream = encode_stream(tokenizer, (s.text for s in stdlib_corpus().train))
    recipe = _scaled(DraftRecipe(), args.scale)
    block = DraftBlock(model.config)
    start_from_main(block, model)
    budget = Budget(steps=None if args.minutes else args.steps, minutes=args.minutes)
    done = _saver(block, args.out)
    train_block(block, model, stream, recipe, budget, seed=args.seed, done=done)
    write_block(block, args.out)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("out", type=Path, help="folder for the checkpoint and draft_log.json")
    parser.add_argument(
        "--checkpoint", type=resolve, default=resolve("tiny:deepseek_v4"), help="main model"
    )
    parser.add_argument("--steps", type=int, default=DEFAULT_STEPS)
    parser.add_argument("--minutes", type=float, help="stop by time instead of by steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--scale", type=int, default=1, help="divide batches and texts, to try the script out"
    )
    return parser


def _scaled(recipe: DraftRecipe, scale: int) -> DraftRecipe:
    return dataclasses.replace(
        recipe,
        batch=max(2, recipe.batch // scale),
        tokens=recipe.tokens // scale,
        prompt=max(2, recipe.prompt // scale),
        own_texts=max(1, recipe.own_texts // scale),
    )


def _saver(block: DraftBlock, out: Path) -> Callable[[DraftRow], None]:
    rows: list[DraftRow] = []

    def done(row: DraftRow) -> None:
        if row.step <= 3 or row.step % SAY_EVERY == 0:
            equal = ", ".join(f"{share:.3f}" for share in row.equal)
            print(
                f"step {row.step}: {row.minutes} min, loss {row.loss:.3f}, {equal}", flush=True
            )
            rows.append(row)
        if row.step % SAVE_EVERY == 0:
            write_block(block, out)
            (out / "draft_log.json").write_text(json.dumps(rows) + "\n", encoding="utf-8")

    return done


if __name__ == "__main__":
    main()
