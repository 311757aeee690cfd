"""Which configs are another architecture, and the sentence that says so.

These look like DeepSeek-V4 and share some of its keys, so that a parser would find many small
faults where there is one big one.
"""

from __future__ import annotations

from collections.abc import Mapping

DSPARK = (
    "DSpark drafters (three draft stages under mtp.*) are not supported; use a release with the "
    "single MTP block, or one without a drafter"
)
V41 = (
    "DeepSeek-V4.1 shares compressed caches between layers and has n-gram tables, which is another "
    "architecture than DeepSeek-V4"
)
VISION = "vision towers are not supported; use the text-only release"


def refusals(raw: Mapping[str, object]) -> list[str]:
    """Sentences that name the architecture; empty for a DeepSeek-V4 text model."""
    model_type = raw.get("model_type")
    if model_type == "deepseek_v41":
        return [f"model_type is 'deepseek_v41': {V41}"]
    if model_type != "deepseek_v4":
        return [f"model_type is {model_type!r}; this parser reads 'deepseek_v4' only"]
    found = []
    if evidence := _dspark_evidence(raw):
        found.append(f"{evidence}: {DSPARK}")
    vision = sorted(key for key in raw if key == "vision_config" or key.startswith("vision_"))
    if vision:
        found.append(f"{', '.join(vision)}: {VISION}")
    return found


def _dspark_evidence(raw: Mapping[str, object]) -> str:
    keys = sorted(key for key in raw if key.startswith("dspark_"))
    if keys:
        return ", ".join(keys)
    if raw.get("num_nextn_predict_layers") == 3:
        return "num_nextn_predict_layers is 3"
    ratios, layers = raw.get("compress_ratios"), raw.get("num_hidden_layers")
    if (
        isinstance(ratios, list | tuple)
        and isinstance(layers, int)
        and len(ratios) == layers + 3
    ):
        return f"compress_ratios has {len(ratios)} entries for {layers} layers"
    return ""
