"""``python -m benchmarks``: the figures in README and docs."""

from benchmarks.tables import main

if __name__ == "__main__":
    main()
