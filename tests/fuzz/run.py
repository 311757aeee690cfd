"""Play many fuzz programs and write a log: `make fuzz N=2000`, or one again with --only.

The log says seed, machine, time and what was found; exit status 1 where something was.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import onnxruntime
from support import fuzz as window
from support import hybrid_fuzz as hybrid
from support.fuzz import Score

from cachegraph.models.contract import RowSharing


def main() -> int:
    """Read options, play, print and write the log."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--family", choices=("deepseek_v4", "qwen4_exp"), default="deepseek_v4"
    )
    parser.add_argument("--programs", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="play the program of this number alone")
    parser.add_argument("--log", type=Path, help="write the log to this file too")
    options = parser.parse_args()
    numbers = range(options.programs) if options.only is None else [options.only]
    score, start = Score(), time.monotonic()
    with TemporaryDirectory() as folder:
        players = _players(options.family, Path(folder))
        for done, number in enumerate(numbers, start=1):
            players[number % len(players)].play(options.seed, number // len(players), score)
            if done % 100 == 0:
                print(f"{done} programs, {len(score.failures)} failures", flush=True)
        for player in players:
            player.close()
    about = window if options.family == "deepseek_v4" else hybrid
    sizes = f"{', '.join(about.MODELS)} (weights of seed {about.SEED}), {about.CAPACITY}"
    log = report(score, options.seed, sizes, time.monotonic() - start)
    print(log)
    if options.log:
        options.log.parent.mkdir(parents=True, exist_ok=True)
        options.log.write_text(log, "utf-8")
    return 1 if score.failures else 0


def _players(family: str, folder: Path) -> list[window.Fuzz | hybrid.Fuzz]:
    """What plays the programs in turn: hybrid memory in both forms of sharing."""
    if family == "deepseek_v4":
        return [window.Fuzz(folder)]
    return [hybrid.Fuzz(folder / sharing.value, sharing) for sharing in RowSharing]


def report(score: Score, seed: int, sizes: str, seconds: float) -> str:
    """The log. sizes: models and capacity in words."""
    lines = [
        f"seed {seed}, {score.programs} programs, {score.operations} operations",
        f"compared with cold runs: {score.compared}, largest difference {score.worst:.1e}",
        f"failures: {len(score.failures)}",
        *score.failures,
        f"near ties of a top-k, where no equality is owed: {len(score.near_ties)}",
        *score.near_ties,
        *(f"{name}: {count}" for name, count in sorted(score.outcomes.items())),
        f"models {sizes}",
        f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, {seconds:.0f} s, one thread",
        f"{_processor()}, {platform.system()} {platform.release()}",
        f"Python {platform.python_version()}, numpy {np.__version__}, "
        f"ONNX Runtime {onnxruntime.__version__}",
    ]
    return "\n".join(lines) + "\n"


def _processor() -> str:
    """The processor's name where the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


if __name__ == "__main__":
    sys.exit(main())
