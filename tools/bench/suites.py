"""The suites of `cachegraph bench`: which models, which programs, which tables."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from cachegraph.models.export_options import Dialect, WeightType
from cachegraph.models.shipped import resolve
from cachegraph.tools.bench.caches import CHOICES, cache_table, measure
from cachegraph.tools.bench.drafting import draft_table, measure_drafting
from cachegraph.tools.bench.models import (
    hybrid_checkpoint,
    hybrid_config,
    medium_checkpoint,
    medium_config,
)
from cachegraph.tools.bench.speed import compare, context_ratio
from cachegraph.tools.bench.tables import context_table, speed_table
from cachegraph.tools.bench.workers import Worker

SHIPPED = "tiny:deepseek_v4"
SHIPPED_HYBRID = "tiny:qwen4_exp"
PEERS = {"transformers eager": "eager", "transformers grouped experts": None}
BASELINE = "transformers eager"
SHORT_CONTEXT, LONG_CONTEXT = 1024, 16384
HYBRID_CONTEXTS = 2048, 32768


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """Settings that all suites share."""

    work: Path
    threads: int
    repeats: int
    device: str
    with_peers: bool
    weights: tuple[str, ...]
    report: Callable[[str], None]

    def run(self, suite: str, stack: ExitStack) -> tuple[str, list[str]]:
        """Title and Markdown lines of one suite. Workers end with the stack."""
        suites = {
            "shipped": self._shipped,
            "medium": self._medium,
            "context": self._context,
            "caches": self._caches,
            "drafting": self._drafting,
            "shipped-hybrid": self._shipped_hybrid,
            "hybrid": self._hybrid,
            "hybrid-context": self._hybrid_context,
        }
        return suites[suite](stack)

    def _shipped(self, stack: ExitStack) -> tuple[str, list[str]]:
        checkpoint = resolve(SHIPPED)
        workers = {
            f"cachegraph {dialect} {weights}": self._ours(stack, checkpoint, dialect, weights)
            for dialect in ("ort", "portable")
            for weights in ("f32", "int8")
        }
        workers |= self._peer(stack, checkpoint)
        speeds = compare(
            workers,
            vocab_size=1024,
            context=512,
            block=64,
            repeats=self.repeats,
            report=self.report,
        )
        title = "Shipped model (3.2M parameters), `cachegraph bench --suite shipped`"
        return title, speed_table(speeds, BASELINE)

    def _medium(self, stack: ExitStack) -> tuple[str, list[str]]:
        checkpoint = medium_checkpoint(self.work / "medium")
        title = "690M-parameter random model, `cachegraph bench --suite medium`"
        vocab = medium_config().vocab_size
        return title, self._beside_peers(stack, checkpoint, vocab, context=512)

    def _shipped_hybrid(self, stack: ExitStack) -> tuple[str, list[str]]:
        title = (
            "Shipped Qwen4-Exp (2.6M parameters), `cachegraph bench --suite shipped-hybrid`"
        )
        checkpoint = resolve(SHIPPED_HYBRID)
        return title, self._beside_peers(stack, checkpoint, 1024, context=HYBRID_CONTEXTS[0])

    def _hybrid(self, stack: ExitStack) -> tuple[str, list[str]]:
        checkpoint = hybrid_checkpoint(self.work / "hybrid")
        title = "320M-parameter random Qwen4-Exp, `cachegraph bench --suite hybrid`"
        vocab = hybrid_config().vocab_size
        return title, self._beside_peers(stack, checkpoint, vocab, context=HYBRID_CONTEXTS[0])

    def _beside_peers(
        self, stack: ExitStack, checkpoint: Path, vocab_size: int, *, context: int
    ) -> list[str]:
        """Every weight form on the ort dialect, and transformers."""
        workers = {
            f"cachegraph ort {weights}": self._ours(
                stack, checkpoint, "ort", weights, context=context + 1536
            )
            for weights in self.weights
        }
        workers |= self._peer(stack, checkpoint)
        speeds = compare(
            workers,
            vocab_size=vocab_size,
            context=context,
            block=16,
            repeats=self.repeats,
            report=self.report,
        )
        return speed_table(speeds, BASELINE)

    def _context(self, stack: ExitStack) -> tuple[str, list[str]]:
        checkpoint = medium_checkpoint(self.work / "medium")
        title = "Step time by context, 690M model, `cachegraph bench --suite context`"
        contexts = (SHORT_CONTEXT, LONG_CONTEXT)
        return title, self._by_context(checkpoint, medium_config().vocab_size, contexts)

    def _hybrid_context(self, stack: ExitStack) -> tuple[str, list[str]]:
        checkpoint = hybrid_checkpoint(self.work / "hybrid")
        title = (
            "Step time by context, 320M Qwen4-Exp, `cachegraph bench --suite hybrid-context`"
        )
        return title, self._by_context(checkpoint, hybrid_config().vocab_size, HYBRID_CONTEXTS)

    def _by_context(
        self, checkpoint: Path, vocab_size: int, contexts: tuple[int, int]
    ) -> list[str]:
        """Decode steps of one bundle at a short and a long context, for every weight form."""
        times = {}
        for weights in self.weights:
            with ExitStack() as one:
                worker = self._ours(
                    one, checkpoint, "ort", weights, context=contexts[1] + 512, sequences=2
                )
                times[f"ort {weights}"] = context_ratio(
                    worker,
                    vocab_size=vocab_size,
                    contexts=contexts,
                    block=8,
                    repeats=self.repeats,
                    report=self.report,
                )
        return context_table(times)

    def _caches(self, stack: ExitStack) -> tuple[str, list[str]]:
        figures = measure(
            self.work, CHOICES, self.report, threads=self.threads, device=self.device
        )
        title = "Cache types of the shipped model, `cachegraph bench --suite caches`"
        return title, cache_table(figures)

    def _drafting(self, stack: ExitStack) -> tuple[str, list[str]]:
        figures = measure_drafting(
            self.work,
            [WeightType(form) for form in self.weights],
            self.report,
            repeats=self.repeats,
            threads=self.threads,
            device=self.device,
        )
        title = "Drafting with the shipped model, `cachegraph bench --suite drafting`"
        return title, draft_table(figures)

    def _ours(
        self,
        stack: ExitStack,
        checkpoint: Path,
        dialect: str,
        weights: str,
        *,
        context: int = 2048,
        sequences: int = 1,
    ) -> Worker:
        from cachegraph.graphgen import ExportOptions, export
        from cachegraph.models.capacity import Capacity

        name = f"{checkpoint.name}_{dialect}_{weights}_{context}_{sequences}"
        bundle = self.work / name
        options = ExportOptions(
            dialect=Dialect(dialect),
            weights=WeightType(weights),
            capacity=Capacity(context=context, sequences=sequences),
        )
        self.report(f"exporting {name}")
        export(checkpoint, bundle, options, static=[], overwrite=True)
        arguments = {"bundle": str(bundle), "threads": self.threads, "device": self.device}
        return stack.enter_context(Worker("ours", arguments))

    def _peer(self, stack: ExitStack, checkpoint: Path) -> dict[str, Worker]:
        if not self.with_peers:
            return {}
        arguments = {"checkpoint": str(checkpoint), "threads": self.threads}
        return {
            name: stack.enter_context(
                Worker("transformers", {**arguments, "experts": experts})
            )
            for name, experts in PEERS.items()
        }
