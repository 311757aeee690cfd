"""Checkpoint names of the parts of a layer; the published ones without a `model.` prefix."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Checkpoint names of one layer's experts; `prefix` such as layers.3.mlp.experts."""

    prefix: str

    def gate_up(self, expert: int) -> list[str]:
        """Gate then up, each [I, D]."""
        return [f"{self.prefix}.{expert}.{part}.weight" for part in ("gate_proj", "up_proj")]

    def down(self, expert: int) -> str:
        """Down, [D, I]."""
        return f"{self.prefix}.{expert}.down_proj.weight"


def shard_name(layer: int, shard: int) -> str:
    """One part of a layer's n-gram table; the parts are joined along the rows."""
    return f"layers.{layer}.ple.ple_embedding.ngram_embedding.shard_{shard}.weight"
