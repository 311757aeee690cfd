"""A model split into stages gives what one graph gives, whatever is done to its sequences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.bundles import Bundles, open_engine
from support.engines import Engines, feed, text
from support.tiny import CONFIGS

from cachegraph.models.contract import DType
from cachegraph.models.errors import ConfigError, ContractError, DeviceError, StepError
from cachegraph.models.manifest import read_manifest
from cachegraph.runtime.binding import CpuBinder, PlacedBinder
from cachegraph.runtime.engine import Engine
from cachegraph.runtime.opening import stage_devices
from cachegraph.runtime.ort import load_onnxruntime
from cachegraph.runtime.stages import StageChain

pytestmark = pytest.mark.r2


def made(bundles: Bundles, **choices: Any) -> Path:
    return bundles.bundle(bundles.checkpoint(), **choices)


def splits(count: int) -> list[tuple[int, ...]]:
    """Two uneven stages, three, and one a layer."""
    return [(1, count - 1), (1, count - 2, 1), (1,) * count]


def play(engine: Engine) -> list[np.ndarray]:
    """Logits along a run with neighbours, unequal steps, a rewind, a copy and a checkpoint."""
    engine.clear()
    steps = ({0: 17, 1: 4}, {0: 1, 1: 9}, {1: 1})
    rows = [row for counts in steps for row in feed(engine, counts).values()]
    engine.remove(0, 15)
    engine.copy(1, 2)
    rows += feed(engine, {0: 6, 2: 3}).values()
    engine.checkpoints.prepare("delta", 4)
    engine.checkpoints.save()
    rows += feed(engine, {0: 4}).values()
    engine.checkpoints.accept(0, 2)
    engine.checkpoints.release()
    rows += feed(engine, {0: 3}).values()
    return rows


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("level", ["basic", "all"])
def test_every_split_gives_the_logits_of_one_graph(
    bundles: Bundles, number: int, level: str
) -> None:
    layers = len(read_manifest(made(bundles)).config["layer_kinds"])
    split = splits(layers)[number]
    with open_engine(made(bundles), level) as one:
        wanted = play(one)
    with open_engine(made(bundles, split=split), level) as many:
        assert isinstance(many._graph, StageChain)
        assert len(many._graph.parts) == len(split)
        got = play(many)
        assert many.memory.by_kind == one.memory.by_kind
    for mine, theirs in zip(got, wanted, strict=True):
        if level == "basic":
            assert np.array_equal(mine, theirs)
        assert np.abs(mine - theirs).max() <= 1e-5


@pytest.mark.parametrize("name", CONFIGS)
def test_one_layer_a_stage_is_the_model_whatever_its_layers(
    bundles: Bundles, name: str
) -> None:
    """Stages without compressed rows, without hash layers, with a head alone behind a window."""
    checkpoint = bundles.checkpoint(name)
    whole = bundles.bundle(checkpoint)
    split = (1,) * len(read_manifest(whole).config["layer_kinds"])
    runs = []
    for folder in (whole, bundles.bundle(checkpoint, split=split)):
        with open_engine(folder, "basic") as engine:
            runs.append(play_plainly(engine))
    assert np.array_equal(*runs)


@pytest.mark.parametrize("ways", [(0, 1), (1, 0)])
def test_saved_sequences_move_between_split_and_whole(
    bundles: Bundles, tmp_path: Path, ways: tuple[int, int]
) -> None:
    folders = (made(bundles), made(bundles, split=(2, 3)))
    with open_engine(folders[ways[0]]) as one, open_engine(folders[ways[1]]) as two:
        feed(one, {0: 19})
        one.save(tmp_path / "state")
        two.restore(tmp_path / "state")
        wanted, got = feed(one, {0: 7})[0], feed(two, {0: 7})[0]
    assert np.abs(got - wanted).max() <= 1e-5


def test_a_fault_in_a_later_stage_drops_the_sequences_of_the_call(bundles: Bundles) -> None:
    """What the first stage wrote of the step that failed is seen by nobody afterwards."""
    with (
        open_engine(made(bundles)) as whole,
        open_engine(made(bundles, split=(2, 3))) as engine,
    ):
        feed(engine, {0: 9, 1: 5})
        chain = engine._graph
        assert isinstance(chain, StageChain)
        session = chain.parts[1].session

        class Failing:
            def run_with_iobinding(self, binding: Any) -> None:
                raise RuntimeError("no more")

        chain.parts[1].session = Failing()
        with pytest.raises(StepError, match="no more"):
            feed(engine, {0: 1})
        chain.parts[1].session = session
        assert (engine.length(0), engine.length(1)) == (0, 5)
        feed(whole, {1: 5})
        wanted, got = (feed(run, {0: 11, 1: 3}) for run in (whole, engine))
        assert all(np.abs(got[seq] - wanted[seq]).max() <= 1e-5 for seq in wanted)


def test_streams_cross_between_devices_through_the_host(bundles: Bundles) -> None:
    """Two CPU binders stand for two devices: nothing is shared, and the numbers are the same."""
    split = made(bundles, split=(1, 3, 1))
    with open_engine(split) as engine:
        wanted = play_plainly(engine)
    with open_engine(split) as engine:
        chain = engine._graph
        assert isinstance(chain, StageChain)
        ort = load_onnxruntime()
        chain._binders = (chain._binders[0], CpuBinder(ort), CpuBinder(ort))
        got = play_plainly(engine)
        call = next(iter(chain._calls.values()))
        assert all("carried" in own.inputs for own in call.stages[1:])
    assert np.array_equal(got, wanted)


def play_plainly(engine: Engine) -> np.ndarray:
    return np.concatenate([*feed(engine, {0: 13}).values(), *feed(engine, {0: 1}).values()])


def test_rows_go_to_the_device_of_their_buffer() -> None:
    ort = load_onnxruntime()
    ours, theirs = CpuBinder(ort), CpuBinder(ort)
    one = ours.host((4, 2), np.dtype(np.float32))
    other = theirs.host((4, 2), np.dtype(np.float32))
    placed = PlacedBinder({id(one): ours, id(other): theirs})
    rows = np.array([1, 3])
    placed.write_rows(one, rows, np.ones((2, 2), np.float32))
    placed.copy_rows(one, rows, np.array([0, 2]))
    assert one.array.min() == 1
    assert not other.array.any()
    placed.zero_rows(one, 0, 2)
    assert placed.read_rows(one, np.arange(4)).sum(axis=1).tolist() == [0, 0, 2, 2]
    assert placed.beside(one) is ours
    assert placed.beside(other) is theirs
    with pytest.raises(DeviceError, match="device of a stage"):
        placed.cache(np.zeros((2, 2), np.float32), DType.FLOAT32)


class _Ort:
    """An ONNX Runtime that sees some NVIDIA GPUs."""

    def __init__(self, gpus: int) -> None:
        self.gpus = gpus

    def get_ep_devices(self) -> list[Any]:
        return [type("Device", (), {"ep_name": "CUDAExecutionProvider"})] * self.gpus


def test_devices_are_the_manifests_where_there_are_gpus(bundles: Bundles) -> None:
    folder = made(bundles, split=(3, 2), devices=("cuda:0", "cuda:1"))
    manifest = read_manifest(folder)
    assert stage_devices(_Ort(2), manifest, "auto") == ("cuda:0", "cuda:1")
    assert stage_devices(_Ort(2), manifest, "cpu") == ("cpu", "cpu")
    assert stage_devices(_Ort(2), manifest, "cuda:1") == ("cuda:1", "cuda:1")
    assert stage_devices(_Ort(0), manifest, "auto") == ("cpu", "cpu")
    with pytest.raises(DeviceError, match="cuda:1: ONNX Runtime sees 1"):
        stage_devices(_Ort(1), manifest, "cuda")
    with pytest.raises(DeviceError, match="sees no NVIDIA GPU"):
        stage_devices(_Ort(0), manifest, "cuda")
    mixed = read_manifest(made(bundles, split=(2, 1, 2), devices=("cpu", "cuda", "cuda:0")))
    assert stage_devices(_Ort(1), mixed, "auto") == ("cpu", "cuda:0", "cuda:0")


def test_a_missing_stage_and_static_graphs_are_refused(
    bundles: Bundles, tmp_path: Path
) -> None:
    from shutil import copytree

    from cachegraph.graphgen import ExportOptions, StaticSize, export, freeze_bundle

    folder = copytree(made(bundles, split=(3, 2)), tmp_path / "split")
    with pytest.raises(ConfigError, match="split into stages"):
        freeze_bundle(folder, [StaticSize(1, 1, 16)])
    with pytest.raises(ConfigError, match="static graphs of stages"):
        export(
            bundles.checkpoint(),
            tmp_path / "other",
            ExportOptions(split=(3, 2)),
            static=[StaticSize(1, 1, 16)],
        )
    (folder / "stage1.onnx").unlink()
    with pytest.raises(ContractError, match=r"stage1\.onnx is missing"):
        Engine.load(folder)


def test_text_continues_across_stages(engines: Engines, bundles: Bundles) -> None:
    whole = engines.get()
    ids = text(3, 0, 11, whole.manifest.vocab_size)
    wanted = [event.choice.token for event in whole.generate([ids])][:16]
    with open_engine(made(bundles, split=(4, 1))) as engine:
        assert [event.choice.token for event in engine.generate([ids])][:16] == wanted
