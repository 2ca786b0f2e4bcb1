"""The command line: reads options, calls the functions of Python users, and prints.

Commands import what they need when they run, because torch takes seconds and `--help` should not wait for it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import click

from feddbe.cli import data, export, federation, methods, results, run, studies
from feddbe.cli.base import Group, explain_error, explain_fault, opening_runs_once, print_error
from feddbe.errors import FeddbeError

app = Group("feddbe", "Personalized federated learning with the Domain Bias Eliminator.")
click.version_option(package_name="feddbe", message="feddbe %(version)s")(app)
_READING = {
    results.runs, results.show, results.verify, results.analyze, results.fairness, results.overhead,
    results.report, export.export, export.predict,
}  # fmt: skip
"""Commands that only read runs."""
for command in (
    run.run, run.compare, results.runs, results.show, results.verify, results.analyze, results.fairness,
    results.overhead, results.report, studies.reproduce, studies.tune, export.export, export.predict,
    methods.methods, data.group, federation.group,
):  # fmt: skip
    app.add_command(opening_runs_once(command) if command in _READING else command)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code: 2 invalid input, 3 diverged, 130 Ctrl-C."""
    for stream in ("stdout", "stderr"):
        if getattr(sys, stream) is None:  # closed, as by `>&-`
            setattr(sys, stream, open(os.devnull, "w"))  # noqa: PTH123, SIM115
    command_line = list(sys.argv[1:] if arguments is None else arguments)
    try:
        # not app.main, which treats Ctrl-C and broken pipes differently
        with app.make_context("feddbe", list(command_line), obj=command_line) as context:
            code = app.invoke(context)
        sys.stdout.flush()
        return int(code or 0)
    except click.exceptions.Exit as done:  # --help
        return done.exit_code
    except SystemExit as error:  # a user's model or method
        return print_error(f"user code called sys.exit({error.code})", 2)
    except FeddbeError as error:
        return print_error(str(error), error.exit_code)
    except KeyboardInterrupt:
        return print_error("stopped", 130)
    except BrokenPipeError:  # `feddbe show RUN | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (OSError, MemoryError, ImportError, RuntimeError, SystemError) as error:
        line = explain_fault(error)
        if line is None:
            raise
        return print_error(line, 2)
    except click.ClickException as error:
        return print_error(explain_error(error), 2)
