"""docs/benchmarks.md: every figure with machine, versions, date and the command that makes it."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from cachegraph.tools.bench.speed import Speed

_PACKAGES = ("cachegraph", "onnxruntime", "onnxruntime-gpu", "numpy", "transformers", "torch")


def machine_lines(threads: int) -> list[str]:
    """Where and when the figures were made."""
    versions = ", ".join(f"{name} {v}" for name in _PACKAGES if (v := _version(name)))
    return [
        f"- date: {datetime.now(UTC):%Y-%m-%d}",
        f"- machine: {_cpu()}, {os.cpu_count()} cores, {_memory_gib():.0f} GiB, Linux "
        f"{platform.release()}",
        f"- threads: {threads}",
        f"- versions: Python {platform.python_version()}, {versions}",
    ]


def speed_table(speeds: Sequence[Speed], baseline: str) -> list[str]:
    """A Markdown table of speeds with ratios to one program of the same context."""
    lines = [
        "| program | context | decode tokens/s | ratio | prefill tokens/s | ratio | host share |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    bases = {s.context: s for s in speeds if s.name == baseline}
    for s in speeds:
        base = bases.get(s.context)
        decode = f"{s.decode_per_second / base.decode_per_second:.2f}" if base else "-"
        prefill = f"{s.prefill_per_second / base.prefill_per_second:.2f}" if base else "-"
        share = "-" if s.host_share is None else f"{100 * s.host_share:.1f}%"
        lines.append(
            f"| {s.name} | {s.context} | {s.decode_per_second:.1f} | {decode} | "
            f"{s.prefill_per_second:.0f} | {prefill} | {share} |"
        )
    return lines


def context_table(times: Mapping[str, Mapping[int, float]]) -> list[str]:
    """A Markdown table of step times by context, and the ratio of the last to the first."""
    contexts = list(next(iter(times.values())))
    lines = [
        "| bundle | " + " | ".join(f"ms at {c}" for c in contexts) + " | ratio |",
        "| --- " * (len(contexts) + 2) + "|",
    ]
    for name, by_context in times.items():
        values = " | ".join(f"{by_context[c]:.1f}" for c in contexts)
        ratio = by_context[contexts[-1]] / by_context[contexts[0]]
        lines.append(f"| {name} | {values} | {ratio:.2f} |")
    return lines


def replace_section(path: Path, title: str, lines: Sequence[str]) -> None:
    """Put `lines` under the `## title` of a Markdown file, in place of what stood there."""
    text = path.read_text(encoding="utf-8") if path.exists() else "# Benchmarks\n"
    head, _, rest = text.partition(f"## {title}\n")
    _, mark, tail = rest.partition("\n## ")
    body = "\n".join(lines)
    after = f"\n## {tail}" if mark else ""
    path.write_text(f"{head.rstrip()}\n\n## {title}\n\n{body}\n{after}", encoding="utf-8")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _memory_gib() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
