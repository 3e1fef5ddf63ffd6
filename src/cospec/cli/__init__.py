"""The command line. A module here imports heavy things inside its functions, so that ``--help`` is quick."""

import sys

from cospec.system import unsupported

# Before any command is imported: the libraries of some commands may be absent on such a system.
if sentence := unsupported():
    sys.exit(f"cospec: {sentence}")
