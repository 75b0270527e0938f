"""Text that lies on every machine: docstrings and sources of the installed Python standard library."""

from __future__ import annotations

import ast
import functools
import hashlib
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from qtool.quant.errors import QtoolError

_EXCERPT = 4000  # characters of each kind (prose, code) taken from one file, so that a few documents span many modules
_LEAST = 200  # shorter excerpts are left out
# tests and demos, generated tables, and code that is carried for others
_SKIP_MODULES = {"test", "idlelib", "turtledemo", "lib2to3", "pydoc_data", "encodings", "ensurepip", "this"}
_SKIP_FOLDERS = {"test", "tests", "__pycache__", "_vendor"}


def _in_evaluation(module: str) -> bool:
    """A quarter of the modules, chosen by a hash of the name, so that the split is the same everywhere."""
    return hashlib.sha256(module.encode()).digest()[0] < 64


def _module_files(stdlib: Path) -> Iterator[tuple[str, Path]]:
    """(top-level module, source file), in an order that is fixed but spreads neighbours in the alphabet."""
    files = []
    for module in sorted(sys.stdlib_module_names - _SKIP_MODULES):
        if (stdlib / f"{module}.py").is_file():
            files.append((module, stdlib / f"{module}.py"))
        elif (stdlib / module).is_dir():
            files += [
                (module, path)
                for path in sorted((stdlib / module).rglob("*.py"))
                if not _SKIP_FOLDERS & set(path.relative_to(stdlib).parts)
            ]
    yield from sorted(files, key=lambda f: hashlib.sha256(f[1].relative_to(stdlib).as_posix().encode()).digest())


def _statements(tree: ast.AST) -> Iterator[ast.AST]:
    """It and all statements within; expressions, which are most of a tree, hold no docstrings."""
    yield tree
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
            yield from _statements(child)


def _docstring_nodes(tree: ast.Module) -> Iterator[ast.Constant]:
    for node in _statements(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) or not node.body:
            continue
        match node.body[0]:
            case ast.Expr(value=ast.Constant(value=str()) as docstring):
                yield docstring


def _cut(text: str) -> str:
    """The first `_EXCERPT` characters, ended at a line."""
    if len(text) <= _EXCERPT:
        return text
    return text[:_EXCERPT].rpartition("\n")[0]


def _prose_and_code(source: str) -> tuple[str, str]:
    """The docstrings of a source file as prose; its code without docstrings and without the comments at its head."""
    lines = source.splitlines()
    nodes = sorted(_docstring_nodes(ast.parse(source)), key=lambda n: n.lineno)
    prose = "\n\n".join("\n".join(line.strip() for line in str(n.value).strip().splitlines()) for n in nodes)
    documented = {i for n in nodes for i in range(n.lineno, (n.end_lineno or n.lineno) + 1)}
    code = [line for i, line in enumerate(lines, start=1) if i not in documented]
    start = next((i for i, line in enumerate(code) if line.strip() and not line.startswith("#")), len(code))
    return prose, "\n".join(code[start:])


@functools.cache  # a second of parsing, a few megabytes
def stdlib_documents(split: Literal["calibration", "evaluation"]) -> tuple[str, ...]:
    """Excerpts of the standard library, prose and code in turn; the two splits share no module.

    The same Python gives the same documents in the same order.

    Raises:
        QtoolError: this Python comes without the sources of its library.
    """
    stdlib = Path(sysconfig.get_path("stdlib"))
    documents: list[str] = []
    for module, path in _module_files(stdlib):
        if _in_evaluation(module) != (split == "evaluation"):
            continue
        try:
            parts = _prose_and_code(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):  # samples of broken code and of old encodings
            continue
        documents += [cut for part in parts if len(cut := _cut(part)) >= _LEAST]
    if not documents:
        raise QtoolError(
            f"{stdlib}: this Python comes without the sources of its standard library, from which the default text "
            "is made; pass a text file with --data"
        )
    return tuple(documents)
