"""Lay out build/tree/qtool as links to the source folders, as an installed package would look.

Type checkers, and machines where nothing is installed, see the packages through it: PYTHONPATH=build/tree.
"""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("quant", "sensitivity", "evalsets", "runtime", "cli")


def main() -> None:
    package = ROOT / "build" / "tree" / "qtool"
    package.mkdir(parents=True, exist_ok=True)
    for link in package.iterdir():
        link.unlink()
    for source in sorted((ROOT / "qtool").iterdir()):
        if source.name != "__pycache__":
            (package / source.name).symlink_to(source)
    for room in ROOMS:
        (package / room).symlink_to(ROOT / room)


if __name__ == "__main__":
    main()
