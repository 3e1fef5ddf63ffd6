"""``python -m cospec`` is the command ``cospec``."""

from cospec.cli.main import app

if __name__ == "__main__":
    app()
