"""The subcommands: one module each, whose function `command` is what the user calls.

A module imports at its top only the standard library, typer, cachegraph.models and light modules
of tools; graphgen, runtime, onnx and the like are imported inside `command`, so that `--help` is
fast and each command asks only for the packages it uses.
"""

# In the order that `cachegraph --help` lists them; tests/tools compares it with the folder.
COMMANDS: tuple[str, ...] = (
    "export",
    "generate",
    "chat",
    "logits",
    "plan",
    "inspect",
    "freeze",
    "bench",
)
