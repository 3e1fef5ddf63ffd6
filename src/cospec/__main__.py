"""``python -m cospec`` is the command ``cospec``."""

from cospec.cli.main import main

if __name__ == "__main__":
    main()
