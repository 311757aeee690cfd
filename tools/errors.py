"""What the command line says and returns when something goes wrong.

Knows exit codes and the one line on stderr; knows no command. Codes: 0 done, 1 a check failed,
2 bad input, 70 a fault of ours, 130 interrupted.
"""

from __future__ import annotations

from typer.exceptions import TyperException

from cachegraph.models.errors import CachegraphError

CHECK_FAILED = 1
BAD_INPUT = 2
INTERNAL = 70
INTERRUPTED = 130

# Import name of an optional package -> the extra that brings it.
_EXTRAS = {
    "ml_dtypes": "export",
    "onnx": "export",
    "onnx_ir": "export",
    "onnxscript": "export",
    "onnxruntime": "cpu",
    "torch": "test",
    "transformers": "test",
}


class CheckFailedError(CachegraphError):
    """A check ran and its answer is no; the command prints its report before it raises this."""


def exit_code(error: Exception) -> int:
    """The exit code for an error that reached the command line."""
    if isinstance(error, CheckFailedError):
        return CHECK_FAILED
    if isinstance(error, CachegraphError | TyperException | OSError) or _extra(error):
        return BAD_INPUT
    return INTERNAL


def describe(error: Exception) -> str:
    """The text behind `error: `; what was wrong and what to do."""
    if extra := _extra(error):
        return f"{error}; run: pip install 'cachegraph[{extra}]'"
    if isinstance(error, TyperException):
        return f"{error.format_message().rstrip('.')}; see --help"
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.filename}: {error.strerror}"
    if exit_code(error) == INTERNAL:
        return (
            f"{type(error).__name__}: {error}; this is a fault in cachegraph: "
            "run again with --debug and report what it prints"
        )
    return str(error)


def _extra(error: Exception) -> str | None:
    """The extra to install where an optional package is missing, else None."""
    if not isinstance(error, ModuleNotFoundError) or isinstance(error, CachegraphError):
        return None
    return _EXTRAS.get((error.name or "").partition(".")[0])
