"""Progress bars on stderr for long work; silent where stderr is no terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn


@contextmanager
def staged_progress() -> Iterator[Callable[[str, int, int], None]]:
    """A bar for each stage: the callback takes stage, done and total."""
    columns = (
        TextColumn("{task.description:>14}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
    )
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda stage, done, total: None
        return
    tasks: dict[str, TaskID] = {}
    bars = Progress(*columns, console=console)

    def report(stage: str, done: int, total: int) -> None:
        bars.start()  # at the first report: bars that show nothing would print an empty line
        if stage not in tasks:
            tasks[stage] = bars.add_task(stage, total=total)
        bars.update(tasks[stage], completed=done, total=total)

    try:
        yield report
    finally:
        if tasks:
            bars.stop()


@contextmanager
def prefill_progress(
    total: int, shown_from: int = 512
) -> Iterator[Callable[[int, int], None]]:
    """A bar for a prompt's tokens; none for prompts shorter than `shown_from`."""
    if total < shown_from:
        yield lambda done, total: None
        return
    with staged_progress() as report:
        yield lambda done, total: report("prompt", done, total)
