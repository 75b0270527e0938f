"""`python -m qtool.cli`: the same as the `qtool` command."""

from qtool.cli.main import main

main()
