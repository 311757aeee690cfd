"""Plain text in columns, for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

_INDENT = "  "


def columns(
    rows: Sequence[Sequence[object]], header: Sequence[str] | None = None
) -> Iterator[str]:
    """Each row as one line, columns as wide as their widest entry; the last is not padded."""
    table = [[str(cell) for cell in row] for row in ([header] if header else []) + list(rows)]
    if not table:
        return
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]) - 1)]
    for row in table:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        yield (_INDENT + _INDENT.join([*cells, row[-1]])).rstrip()


def byte_words(count: int) -> str:
    """A byte count as people read it, in powers of 1024."""
    size, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"
