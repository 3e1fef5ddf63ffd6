"""Tables and figures of the five papers, compared with ours. ``python -m benchmarks.papers`` prints them all."""
