"""Tables and figures of the five papers beside ours. ``python -m benchmarks.papers`` prints them all."""
