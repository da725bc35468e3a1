"""`python -m equipoise` is the command `equipoise`."""

from equipoise.cli.main import main

main()
