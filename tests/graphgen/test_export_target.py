"""Where a bundle may be written: never over what is not a bundle, never half."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.bundles import Bundles

from cachegraph.graphgen import export
from cachegraph.models.errors import ConfigError

pytestmark = pytest.mark.r1


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_path_that_leads_back_into_a_folder_with_files_is_refused(
    bundles: Bundles, tmp_path: Path
) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match="is no bundle"):
        export(bundles.checkpoint("window_only"), mine / "new" / "..", static=[])
    assert (mine / "thesis.txt").read_text() == "years of work"


def test_a_file_put_into_the_target_meanwhile_is_kept(
    bundles: Bundles, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()

    def disturb(stage: str, done: int, total: int) -> None:
        (out / "note.txt").write_text("mine")

    with pytest.raises(ConfigError, match="is no bundle"):
        export(bundles.checkpoint("window_only"), out, static=[], progress=disturb)
    assert leftovers(out) == ["note.txt"]
    assert leftovers(tmp_path) == ["out"]


def test_a_link_is_refused_and_an_interrupted_overwrite_keeps_the_old_bundle(
    bundles: Bundles, tmp_path: Path
) -> None:
    checkpoint, out = bundles.checkpoint("window_only"), tmp_path / "out"
    export(checkpoint, out, static=[])
    (tmp_path / "link").symlink_to(out)
    with pytest.raises(ConfigError, match="is a link"):
        export(checkpoint, tmp_path / "link", static=[], overwrite=True)

    def stop(stage: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    before = (out / "manifest.json").read_bytes()
    with pytest.raises(KeyboardInterrupt):
        export(checkpoint, out, static=[], overwrite=True, progress=stop)
    assert (out / "manifest.json").read_bytes() == before
    assert leftovers(tmp_path) == ["link", "out"]
    export(checkpoint, out, static=[], overwrite=True)
    assert leftovers(tmp_path) == ["link", "out"]
