"""Checks of an installation's exactness."""
