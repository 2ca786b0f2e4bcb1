"""The command line."""

from feddbe.cli.main import app, main

__all__ = ["app", "main"]
