"""The version of cachegraph: of the distribution, of the command, and written into each bundle."""

VERSION = "0.1.0"
