"""What each cache type costs on the trained model: perplexity on held-out text, and bytes."""

from __future__ import annotations

import pytest

from cachegraph.models.cache_types import CacheType, CacheTypes
from cachegraph.tools.bench.caches import CacheFigure, cache_table, measure

pytestmark = pytest.mark.r3

# Greatest share by which perplexity may differ from f32, and mean KL from it in nats. Measured:
# 0.02%, 0.06% and 0.05%; 0.00001, 0.0005 and 0.0006.
BOUNDS = {
    CacheType.F16: (0.001, 0.0001),
    CacheType.BF16: (0.005, 0.002),
    CacheType.Q8_0: (0.005, 0.002),
}
# Bytes of a row: 64 values of the trained model.
SHARE = {CacheType.F16: 0.5, CacheType.BF16: 0.5, CacheType.Q8_0: 34 / 128}


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> list[CacheFigure]:
    choices = [CacheTypes(rows=form, index=form) for form in CacheType]
    return measure(tmp_path_factory.mktemp("caches"), choices, lambda line: None)


def test_perplexity_and_bytes_of_every_type(
    figures: list[CacheFigure], capsys: pytest.CaptureFixture[str]
) -> None:
    plain, *others = figures
    with capsys.disabled():
        print("\n" + "\n".join(cache_table(figures)))
    for figure in others:
        form = figure.types.rows
        ratio, divergence = BOUNDS[form]
        assert abs(figure.perplexity / plain.perplexity - 1) <= ratio, form
        assert 0 < figure.divergence <= divergence, form
        assert figure.rows_bytes == SHARE[form] * plain.rows_bytes
        assert figure.index_bytes == SHARE[form] * plain.index_bytes
        assert figure.state_bytes == plain.state_bytes
        assert figure.published_bytes < 0.6 * plain.published_bytes
