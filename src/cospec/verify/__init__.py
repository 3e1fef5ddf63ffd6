"""Checks that an installation keeps its promises."""
