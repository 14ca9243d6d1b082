"""`python -m afield`: the same as the command `afield`."""

from afield.cli import main

main()
