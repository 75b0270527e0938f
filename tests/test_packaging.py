"""The explicit package list of pyproject.toml against the tree, and the one direction of imports."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("quant", "sensitivity", "evalsets", "runtime", "cli")
# a room may import those to its right: cli → sensitivity, evalsets → runtime → quant
ALLOWED = {
    "quant": {"quant"},
    "runtime": {"runtime", "quant"},
    "evalsets": {"evalsets", "runtime", "quant"},
    "sensitivity": {"sensitivity", "evalsets", "runtime", "quant"},
    "cli": {"cli", "sensitivity", "evalsets", "runtime", "quant"},
}


def _packages_in_tree() -> set[str]:
    found = {"qtool"}
    for room in ROOMS:
        for init in (ROOT / room).rglob("__init__.py"):
            found.add("qtool." + ".".join(init.parent.relative_to(ROOT).parts))
    return found


def test_package_list_is_the_tree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert set(project["tool"]["setuptools"]["packages"]) == _packages_in_tree()


def test_every_python_file_lies_in_a_package() -> None:
    packages = _packages_in_tree()
    for room in ROOMS:
        for file in (ROOT / room).rglob("*.py"):
            name = "qtool." + ".".join(file.parent.relative_to(ROOT).parts)
            assert name in packages, f"{file} lies in a folder without __init__.py"


def _imports(file: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names.add(node.module)
        elif isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
    return names


@pytest.mark.parametrize("room", ROOMS)
def test_imports_run_one_way(room: str) -> None:
    for file in (ROOT / room).rglob("*.py"):
        for name in _imports(file):
            parts = name.split(".")
            if parts[0] == "qtool" and len(parts) > 1 and parts[1] in ROOMS:
                assert parts[1] in ALLOWED[room], f"{file.relative_to(ROOT)} imports {name}"


def test_engine_imports_no_torch() -> None:
    for file in (ROOT / "runtime" / "engine").rglob("*.py"):
        heavy = {n.split(".")[0] for n in _imports(file)} & {"torch", "transformers", "fastapi", "numpy"}
        assert not heavy, f"{file.name} imports {heavy}"
    code = "import sys, qtool.runtime.engine.core; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_http_stack_stays_in_the_server() -> None:
    http = {"fastapi", "uvicorn", "starlette", "zmq", "msgspec"}
    for room in ROOMS:
        for file in (ROOT / room).rglob("*.py"):
            if "server" not in file.parts:
                assert not {n.split(".")[0] for n in _imports(file)} & http, f"{file} imports what is the server's"
