"""The `qtool` command: one verb a file; errors become one line and an exit status of their own."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import traceback

import typer
from typer.exceptions import TyperException

from qtool._version import __version__
from qtool.cli import signals
from qtool.cli.common import EXIT_ERROR, EXIT_INTERRUPTED
from qtool.quant.errors import QtoolError

VERBS = ("fetch", "analyze", "plan", "quantize", "compare", "compress", "serve", "bench", "chat", "inspect", "convert")


def _show_version(value: bool) -> None:
    if value:
        typer.echo(f"qtool {__version__}")
        raise typer.Exit


def build_app() -> typer.Typer:
    """The typer application with every verb. Verbs import the heavy rooms inside their functions."""
    app = typer.Typer(
        name="qtool",
        no_args_is_help=True,
        add_completion=True,
        pretty_exceptions_enable=False,
        rich_markup_mode="markdown",
        help="Measure, plan, quantize, prove and serve language models in INT4/INT8.",
        epilog="Exit status: 0 done or PASS, 1 gate FAIL, 2 gate INCONCLUSIVE, 3 error, 130 interrupted.",
    )

    @app.callback()
    def root(
        version: bool = typer.Option(
            False, "--version", callback=_show_version, is_eager=True, help="Print the version."
        ),
    ) -> None: ...

    for verb in VERBS:
        module = importlib.import_module(f"qtool.cli.{verb}")
        if hasattr(module, "app"):  # a verb with subcommands
            app.add_typer(module.app, name=verb)
        else:
            app.command(verb)(module.command)
    return app


def run(args: list[str] | None = None) -> int:
    """Run the command line and return its exit status; every refusal is one line on stderr."""
    try:
        result = build_app()(args=args, standalone_mode=False)
        if result == EXIT_INTERRUPTED:  # what typer makes of a KeyboardInterrupt
            raise KeyboardInterrupt
    except (KeyboardInterrupt, typer.Abort):
        return _interrupted(args)
    except typer.Exit as stop:
        return stop.exit_code
    except BrokenPipeError:
        # the reader of our output went away (`qtool inspect | head`): not an error of ours
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        # C code may have made it of the interrupt
        return _interrupted(args) if signals.received() is not None else _refused(error)
    return result if isinstance(result, int) else 0


def _interrupted(args: list[str] | None) -> int:
    serves = (sys.argv[1:] if args is None else args)[:1] == ["serve"]
    if serves and signals.received() == signal.SIGTERM:
        return 0  # whoever looks after a server wanted its end, and got it
    typer.echo("interrupted: nothing half-written was left behind", err=True)
    return EXIT_INTERRUPTED


def _refused(error: Exception) -> int:
    if isinstance(error, TyperException):
        if not (message := error.format_message()):
            return 0  # `qtool` alone: the help was printed
        typer.echo(f"error: {message} (see `qtool --help`, `qtool VERB --help`)", err=True)
    elif isinstance(error, QtoolError):
        typer.echo(f"error: {error}", err=True)
    elif isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        typer.echo(f"error: {where}{error.strerror or error}", err=True)
    else:  # a fault of ours: Python's own status for it, 1, would say that the gate FAILs
        traceback.print_exception(error)
    return EXIT_ERROR


def main() -> None:
    # OpenMP threads that spin for long freeze each other as soon as anything else wants a core; a short spin costs
    # nothing where the machine is idle. libgomp reads it when torch is imported.
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")
    signals.obey()
    try:
        status = run()
    except KeyboardInterrupt:  # one more, while the first was told of
        status = EXIT_INTERRUPTED
    signals.ignore()
    sys.exit(status)
