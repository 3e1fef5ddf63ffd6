"""``python -m benchmarks``: the measurements whose figures the README shows, one after the other."""

from benchmarks import latency, overhead

latency.main()
overhead.main()
