"""The shipped checkpoints are found by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from cachegraph.models import shipped
from cachegraph.models.deepseek_v4.parse import load_config as load_deepseek_v4
from cachegraph.models.errors import ConfigError
from cachegraph.models.qwen4_exp.parse import load_config as load_qwen4_exp

pytestmark = pytest.mark.r0


LOADERS = {"tiny:deepseek_v4": load_deepseek_v4, "tiny:qwen4_exp": load_qwen4_exp}


@pytest.mark.parametrize("name", shipped.known_names())
def test_every_name_is_a_whole_checkpoint(name):
    folder = shipped.resolve(name)
    wanted = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert wanted | {"README.md"} <= {path.name for path in folder.iterdir()}
    assert LOADERS[name](folder).num_layers == 6


def test_a_path_passes_through(tmp_path: Path):
    assert shipped.resolve(tmp_path) == tmp_path
    assert shipped.resolve(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("name", ["tiny:deepseek_v5", "tiny:", "no/such/folder"])
def test_what_is_not_there_is_refused_with_the_known_names(name):
    with pytest.raises(ConfigError, match=r"tiny:deepseek_v4\b"):
        shipped.resolve(name)
