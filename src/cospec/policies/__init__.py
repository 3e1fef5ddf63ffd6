"""How far to speculate, and for whom: one policy a file. No torch."""
