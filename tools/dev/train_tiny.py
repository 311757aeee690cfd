"""Train a tiny model of a family on the standard library's source and write it as a checkpoint.

Needs the test extra (torch, transformers). With `--steps` a run is reproducible on one machine
and number of threads; with `--minutes` it fits a time. See docs/tiny_model.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import nn

from cachegraph.tools.dev.tiny import network, qwen_network
from cachegraph.tools.dev.tiny.corpus import Corpus, stdlib_corpus
from cachegraph.tools.dev.tiny.figures import loss_curve
from cachegraph.tools.dev.tiny.network import save_f16
from cachegraph.tools.dev.tiny.probes import TrainingProbes
from cachegraph.tools.dev.tiny.qwen_probes import QwenProbes
from cachegraph.tools.dev.tiny.schedule import Budget, Recipe
from cachegraph.tools.dev.tiny.tokens import encode_stream, save_tokenizer, train_tokenizer
from cachegraph.tools.dev.tiny.training import Data, Probes, train

DEFAULT_STEPS = 1500  # about what the shipped model had in its two runs together


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """What differs between the models of two families."""

    title: str
    recipe: Recipe
    new_model: Callable[[int, int], nn.Module]
    probes: Callable[[nn.Module], Probes]


FAMILIES = {
    "deepseek_v4": Family(
        title="DeepSeek-V4",
        recipe=Recipe(),
        new_model=network.new_model,
        probes=TrainingProbes,
    ),
    "qwen4_exp": Family(
        title="Qwen4-Exp",
        recipe=Recipe.qwen4_exp(),
        new_model=qwen_network.new_model,
        probes=QwenProbes,
    ),
}


def main() -> None:
    """Parse the command line, train, write checkpoint, log and loss curve."""
    args = _parser().parse_args()
    torch.set_num_threads(args.threads)
    steps = None if args.minutes else args.steps
    family = FAMILIES[args.family]
    recipe = _scaled(family.recipe, args.scale)
    corpus = stdlib_corpus()
    tokenizer = train_tokenizer((s.text for s in corpus.train), recipe.vocab_size)
    save_tokenizer(tokenizer, args.out)
    model = family.new_model(recipe.vocab_size, args.seed)
    data = _data(corpus, tokenizer)
    print(f"{len(data.train)} tokens to train on, {len(data.held_out)} held out", flush=True)
    budget = Budget(steps=steps, minutes=args.minutes)
    probes = family.probes(model)
    rows = train(model, probes, data, recipe, budget, seed=args.seed, say=_say)
    save_f16(model, args.out)
    (args.out / "log.json").write_text(json.dumps(rows) + "\n")
    curve = args.curve or args.out / "loss.svg"
    curve.write_text(loss_curve(rows, f"Tiny {family.title}, seed {args.seed}: bits per byte"))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("out", type=Path, help="folder for the checkpoint and its log")
    parser.add_argument("--family", choices=FAMILIES, default="deepseek_v4")
    parser.add_argument("--steps", type=int, default=DEFAULT_STEPS)
    parser.add_argument("--minutes", type=float, help="stop by time instead of by steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--curve", type=Path, help="SVG of the loss curve (OUT/loss.svg)")
    parser.add_argument(
        "--scale", type=int, default=1, help="divide batches and texts, to try the script out"
    )
    return parser


def _scaled(recipe: Recipe, scale: int) -> Recipe:
    phases = tuple(
        dataclasses.replace(p, tokens=p.tokens // scale, batch=max(1, p.batch // scale))
        for p in recipe.phases
    )
    return dataclasses.replace(
        recipe, phases=phases, eval_batches=max(1, recipe.eval_batches // scale)
    )


def _data(corpus: Corpus, tokenizer: Tokenizer) -> Data:
    held_out = encode_stream(tokenizer, (s.text for s in corpus.held_out))
    size = sum(len(s.data) for s in corpus.held_out)
    return Data(
        train=encode_stream(tokenizer, (s.text for s in corpus.train)),
        held_out=held_out,
        bytes_per_token=size / len(held_out),
    )


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    main()
