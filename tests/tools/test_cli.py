"""The command line: exit codes, one line on stderr, tracebacks only when asked for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import typer

from cachegraph.models.errors import ConfigError
from cachegraph.models.version import VERSION
from cachegraph.tools import cli
from cachegraph.tools.commands import COMMANDS
from cachegraph.tools.errors import CheckFailedError
from cachegraph.tools.output import print_json

pytestmark = pytest.mark.r0


def app_that_raises(error: BaseException) -> typer.Typer:
    app = typer.Typer(rich_markup_mode=None)

    @app.callback()
    def options() -> None: ...

    @app.command()
    def fail() -> None:
        raise error

    return app


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ConfigError("ratio is 5; it must be 4"), 2, "error: ratio is 5; it must be 4"),
        (CheckFailedError("2 of 7 differ"), 1, "error: 2 of 7 differ"),
        (FileNotFoundError(2, "No such file", "a.json"), 2, "error: a.json: No such file"),
        (OSError("disk is odd"), 2, "error: disk is odd"),
        (
            ModuleNotFoundError("No module named 'onnx'", name="onnx.helper"),
            2,
            "error: No module named 'onnx'; run: pip install 'cachegraph[export]'",
        ),
        (
            KeyError("x"),
            70,
            "error: KeyError: 'x'; this is a fault in cachegraph: "
            "run again with --debug and report what it prints",
        ),
    ],
)
def test_an_error_is_one_line_and_a_code(
    error: Exception,
    code: int,
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(cli, "build_app", lambda: app_that_raises(error))
    assert cli.main(["fail"]) == code
    shown = capsys.readouterr()
    assert shown.err == line + "\n"
    assert shown.out == ""


@pytest.mark.parametrize("argv", [["--debug", "fail"], ["fail", "--debug"]])
def test_debug_shows_the_traceback(
    argv: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "build_app", lambda: app_that_raises(ConfigError("bad")))
    assert cli.main(argv) == 2
    assert "Traceback" in capsys.readouterr().err


def test_debug_behind_two_dashes_is_an_argument(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["nope", "--", "--debug"]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_control_c_is_quiet(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "build_app", lambda: app_that_raises(KeyboardInterrupt()))
    assert cli.main(["fail"]) == 130
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("argv", [["nope"], ["--nope"]])
def test_a_usage_error_is_one_line(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(argv) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("error: No such ")
    assert shown.endswith("; see --help\n")
    assert shown.count("\n") == 1


@pytest.mark.parametrize("argv", [[], ["-h"], ["--help"]])
def test_help_lists_every_command(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(argv) == 0
    words = capsys.readouterr().out.split()
    assert [name for name in COMMANDS if name not in words] == []


def test_every_command_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    for name in COMMANDS:
        assert cli.main([name, "--help"]) == 0
        assert f"Usage: cachegraph {name}" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"cachegraph {VERSION}\n"


def test_every_command_module_is_listed() -> None:
    folder = Path(cli.__file__).parent / "commands"
    assert sorted(COMMANDS) == sorted(p.stem for p in folder.glob("[!_]*.py"))


def test_help_imports_nothing_heavy() -> None:
    program = (
        "import sys; from cachegraph.tools.cli import main; main(['--help']); "
        "heavy = {'onnx', 'onnxscript', 'onnxruntime', 'torch', 'transformers'}; "
        "sys.exit(', '.join(heavy & sys.modules.keys()) or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_json_refuses_nan() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        print_json({"loss": float("nan")})
