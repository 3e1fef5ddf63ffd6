"""Where engines and drafters run: threads, processes, messages."""
