"""Measurements to run by hand; each writes its figures, with the machine and the date, to ``results/``."""
