"""`cachegraph logits`: teacher-forced logits of a token list, in any split into steps."""

from __future__ import annotations

import os
from itertools import chain, repeat
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from numpy.typing import NDArray

from cachegraph.models.errors import ConfigError
from cachegraph.tools.counts import parse_counts
from cachegraph.tools.engine_options import (
    BundleArgument,
    DeviceOption,
    SpinningOption,
    ThreadsOption,
    open_engine,
)
from cachegraph.tools.output import JsonFlag, note, print_json


def command(
    bundle: BundleArgument,
    tokens: Annotated[
        Path, typer.Option(help="Token ids, a .npy file of one dimension and integers.")
    ],
    out: Annotated[Path, typer.Option(help="Where the float32 [n, vocab] .npy file goes.")],
    chunks: Annotated[
        str | None,
        typer.Option(help="Sizes of the steps, such as 7,1,64; the last one repeats."),
    ] = None,
    device: DeviceOption = "auto",
    threads: ThreadsOption = 0,
    spinning: SpinningOption = True,
    as_json: JsonFlag = False,
) -> None:
    """Write the logits after every token, fed in steps of the given sizes.

    Example: cachegraph logits out/tiny --tokens ids.npy --out logits.npy --chunks 7,1,64
    """
    ids = load_tokens(tokens)
    sizes = parse_chunks(chunks, ids.size)
    if not out.parent.is_dir():
        raise ConfigError(f"{out.parent} is no folder; --out must lie in one that exists")
    _check_writable(out)
    from cachegraph.runtime import Batch

    rows = []
    with open_engine(bundle, device, threads, spinning) as engine:
        start = 0
        for size in sizes:
            end = start + size
            positions = np.arange(start, end)
            rows.append(
                engine.decode(Batch.of(ids[start:end], positions, logits=[True] * size))
            )
            start = end
    with out.open("wb") as file:
        np.save(file, np.concatenate(rows))
    if as_json:
        print_json({"out": str(out), "tokens": int(ids.size), "chunks": sizes})
    else:
        note(f"wrote {out}: {ids.size} rows, in {len(sizes)} steps")


def _check_writable(path: Path) -> None:
    """OSError where a file cannot be written, before the work for it; what is there stays."""
    is_new = not os.path.lexists(path)
    path.open("ab").close()
    if is_new:
        path.unlink()


def load_tokens(path: Path) -> NDArray[np.int64]:
    """Token ids of a .npy file; ConfigError where it holds something else."""
    try:
        ids = np.load(path, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ConfigError(f"{path} is no .npy file of numbers ({error})") from None
    if not isinstance(ids, np.ndarray) or ids.ndim != 1 or ids.dtype.kind not in "iu":
        shape = getattr(ids, "shape", "?")
        raise ConfigError(f"{path} holds shape {shape}; wanted one dimension of integers")
    if not ids.size:
        raise ConfigError(f"{path} holds no tokens")
    return ids.astype(np.int64)


def parse_chunks(text: str | None, count: int) -> list[int]:
    """Step sizes that add up to `count`; the last size repeats, the final step may be short."""
    if text is None:
        return [count]
    sizes = parse_counts("--chunks", text)
    steps: list[int] = []
    for size in chain(sizes, repeat(sizes[-1])):
        left = count - sum(steps)
        if left == 0:
            return steps
        steps.append(min(size, left))
    raise AssertionError("repeat never ends")
