"""The loss curve of a training run as a small SVG that reads on light and on dark pages.

Two lines and two axes need no plotting library. `python -m cachegraph.tools.dev.tiny.figures
LOG SVG` draws the curve of a log.json.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log
from pathlib import Path

from cachegraph.tools.dev.tiny.schedule import LogRow

WIDTH, HEIGHT = 640, 320
LEFT, RIGHT, TOP, BOTTOM = 48, 20, 52, 44
BYTES_PER_TOKEN = 2.51  # of the shipped tokenizer on the held-out files

_STYLE = """
text { font: 12px sans-serif; fill: #24292f }
.grid { stroke: #d0d7de }
.held { stroke: #0969da; fill: #0969da }
.batch { stroke: #9a6700; fill: #9a6700; stroke-dasharray: 4 3 }
polyline { fill: none !important; stroke-width: 2 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 }
  .grid { stroke: #3d444d }
  .held { stroke: #58a6ff; fill: #58a6ff }
  .batch { stroke: #d29922; fill: #d29922 }
}"""

Points = list[tuple[float, float]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Frame:
    """Maps steps 0 .. last and values low .. high to the drawing's coordinates."""

    last: float
    low: float
    high: float

    def x(self, step: float) -> float:
        """Pixels from the left."""
        return LEFT + (WIDTH - LEFT - RIGHT) * step / self.last

    def y(self, value: float) -> float:
        """Pixels from the top."""
        return TOP + (HEIGHT - TOP - BOTTOM) * (self.high - value) / (self.high - self.low)


def loss_curve(rows: Sequence[LogRow], title: str, *, last_apart: bool = False) -> str:
    """An SVG of held-out text and of single training batches, in bits per byte over steps.

    `last_apart` leaves the last held-out point off the line: it was measured on other text.
    """
    held = [(float(row.step), row.held_out) for row in rows]
    batch = [(float(row.step), row.train_loss / log(2) / BYTES_PER_TOKEN) for row in rows]
    values = [value for _, value in held + batch]
    frame = Frame(
        last=held[-1][0], low=floor(min(values) * 5) / 5 - 0.2, high=ceil(max(values) * 5) / 5
    )
    parts = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        f"<title>{escape(title)}</title><style>{_STYLE}</style>",
        _text(LEFT, 18, title),
        *_legend(),
        *_axes(frame),
        *_curve(frame, batch, "batch", joined=len(batch)),
        *_curve(frame, held, "held", joined=len(held) - last_apart),
        "</svg>\n",
    )
    return "\n".join(parts)


def _legend() -> list[str]:
    entries = ((LEFT, "held", "held-out files"), (LEFT + 160, "batch", "one training batch"))
    return [
        f'<line class="{kind}" x1="{x}" y1="34" x2="{x + 24}" y2="34" stroke-width="2"/>'
        + _text(x + 30, 38, label)
        for x, kind, label in entries
    ]


def _axes(frame: Frame) -> list[str]:
    parts = []
    for tick in range(round(frame.low * 5), round(frame.high * 5) + 1):
        y, right = frame.y(tick / 5), WIDTH - RIGHT
        parts.append(
            f'<line class="grid" x1="{LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}"/>'
        )
        parts.append(_text(LEFT - 8, y + 4, f"{tick / 5:.1f}", anchor="end"))
    for quarter in range(5):
        step = frame.last * quarter / 4
        parts.append(_text(frame.x(step), HEIGHT - 24, f"{step:.0f}", anchor="middle"))
    parts.append(
        _text(WIDTH / 2, HEIGHT - 6, "step; vertical: bits per byte", anchor="middle")
    )
    return parts


def _curve(frame: Frame, points: Points, kind: str, *, joined: int) -> list[str]:
    placed = [(frame.x(step), frame.y(value)) for step, value in points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed[:joined])
    dots = (f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="2.5"/>' for x, y in placed)
    return [f'<polyline class="{kind}" points="{path}"/>', *dots]


def _text(x: float, y: float, content: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(content)}</text>'


def read_log(path: Path) -> list[LogRow]:
    """The rows of a log.json."""
    return [LogRow(*row) for row in json.loads(path.read_text())]


def main() -> None:
    """Draw one log."""
    parser = argparse.ArgumentParser(description="draw the loss curve of a log.json as SVG")
    parser.add_argument("log", type=Path)
    parser.add_argument("svg", type=Path)
    parser.add_argument("--title", default="Training of the tiny DeepSeek-V4, bits per byte")
    parser.add_argument(
        "--last-apart", action="store_true", help="the last row was measured on other text"
    )
    args = parser.parse_args()
    svg = loss_curve(read_log(args.log), args.title, last_apart=args.last_apart)
    args.svg.write_text(svg)


if __name__ == "__main__":
    main()
