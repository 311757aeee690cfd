"""What drafting was worth: figures of generated events, for people and for programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cachegraph.runtime import Event


def drafting_figures(events: Sequence[Event]) -> dict[str, int | float | None]:
    """Drafted and accepted tokens of whole texts, the share accepted, steps and tokens a step.

    A prompt's own call gives its first token and is no step. A figure without a base is None.
    """
    counts = [event.drafts for event in events if event.drafts is not None]
    drafted = sum(count.drafted for count in counts)
    accepted = sum(count.accepted for count in counts)
    steps = sum(count.steps for count in counts)
    return {
        "drafted": drafted,
        "accepted": accepted,
        "accepted_share": accepted / drafted if drafted else None,
        "steps": steps,
        "tokens_per_step": (len(events) - len(counts)) / steps if steps else None,
    }


def drafting_line(events: Sequence[Event]) -> str:
    """The figures in words."""
    figures = drafting_figures(events)
    share, tokens = figures["accepted_share"], figures["tokens_per_step"]
    if share is None or tokens is None:
        return "drafted 0"
    return (
        f"drafted {figures['drafted']}, accepted {figures['accepted']} ({share:.1%}), "
        f"{tokens:.2f} tokens per step"
    )
