"""The command line. A module here imports large libraries inside its functions, so that ``--help`` is quick."""

import sys

from cospec.machine import unsupported

# This check runs before any command is imported: an unsupported system may lack the libraries of some commands.
if sentence := unsupported():
    sys.exit(f"cospec: {sentence}")
