"""The engine on a virtual clock: real scheduler, policies and execution modes, drawn acceptance, computed times."""
