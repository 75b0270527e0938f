"""What every verb shares: where words go (stderr), where results go (stdout), progress bars, common options."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from qtool.quant.progress import ProgressFn

Model = Annotated[str, typer.Argument(metavar="MODEL", help="Model folder, hub id, or the name of a built-in default.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress, no remarks: errors and the result alone.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as one JSON document on stdout.")]
Device = Annotated[str, typer.Option("--device", help="auto, cpu, cuda or cuda:N.")]

EXIT_PASS, EXIT_FAIL, EXIT_INCONCLUSIVE, EXIT_ERROR, EXIT_INTERRUPTED = 0, 1, 2, 3, 130


class Reporter:
    """Where a verb writes: remarks and progress to stderr, its result to stdout (a table, or JSON with --json)."""

    def __init__(self, quiet: bool = False, json_result: bool = False) -> None:
        self.quiet = quiet
        self.json_result = json_result
        self.err = Console(stderr=True, highlight=False)
        self.out = Console(highlight=False)
        logging.basicConfig(
            stream=sys.stderr,
            level=logging.ERROR if quiet else logging.WARNING,
            format="%(levelname)s %(name)s: %(message)s",
        )
        logging.getLogger("qtool").setLevel(logging.ERROR if quiet else logging.INFO)

    def say(self, message: str) -> None:
        """A remark for the person who watches."""
        if not self.quiet:
            self.err.print(message, markup=False)

    def warn(self, message: str) -> None:
        if not self.quiet:
            self.err.print(f"warning: {message}", style="yellow", markup=False)

    def table(self, title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """A result for people; nothing with --json. The first column is left-aligned, the others right."""
        if self.json_result:
            return
        table = Table(title=title, title_justify="left")
        for i, name in enumerate(header):
            table.add_column(name, justify="left" if i == 0 else "right", overflow="fold")
        for row in rows:
            table.add_row(*row)
        self.out.print(table)

    def line(self, text: str) -> None:
        """One line of a result for people; nothing with --json."""
        if not self.json_result:
            self.out.print(text, markup=False, soft_wrap=True)

    def result(self, document: Any) -> None:
        """The result for machines; nothing without --json."""
        if self.json_result:
            sys.stdout.write(json.dumps(document, indent=1, ensure_ascii=False) + "\n")

    @contextmanager
    def progress(self) -> Iterator[ProgressFn]:
        """A ProgressFn that draws one bar per stage on stderr (plain lines, seldom, where stderr is no terminal)."""
        if self.quiet:
            yield lambda what, done, total: None
        elif not self.err.is_terminal:
            yield _line_progress(self.err)
        else:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
            )
            with Progress(*columns, console=self.err) as bar:
                tasks: dict[str, TaskID] = {}

                def report(what: str, done: int, total: int) -> None:
                    if what not in tasks:
                        tasks[what] = bar.add_task(what, total=total)
                    bar.update(tasks[what], completed=done, total=total)

                yield report


def duration(seconds: float) -> str:
    """`40 s`, `12 min`, `3 h 05 min`."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02} min"


def _line_progress(console: Console, every_s: float = 10.0) -> ProgressFn:
    """Progress for logs: a line per stage at most every `every_s` seconds, and one at its end.

    The time left is told from the second line on: the pace since the first, since that need not have been the start.
    """
    last: dict[str, float] = {}
    first: dict[str, tuple[float, int]] = {}

    def report(what: str, done: int, total: int) -> None:
        now = time.monotonic()
        began, before = first.setdefault(what, (now, done))
        if done >= total or now - last.get(what, now - every_s) >= every_s:
            last[what] = now
            left = ""
            if before < done < total:
                left = f", {duration((now - began) / (done - before) * (total - done))} left"
            console.print(f"{what}: {done}/{total}{left}", markup=False)

    return report
