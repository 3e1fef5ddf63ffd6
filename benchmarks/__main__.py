"""``python -m benchmarks``: writes the reports, and the figures that README and docs show."""

from benchmarks.pages import main

if __name__ == "__main__":
    main()
