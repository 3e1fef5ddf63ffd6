"""The engine: types, interfaces, scheduler, verifier, output processor."""
