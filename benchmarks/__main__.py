"""``python -m benchmarks``: the figures that README and docs show."""

from benchmarks.tables import main

if __name__ == "__main__":
    main()
