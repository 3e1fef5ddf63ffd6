"""The command line. A module here imports heavy things inside its functions, so that ``--help`` is quick."""
