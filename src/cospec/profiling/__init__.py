"""Measuring what forward passes and drafts take on this machine, and keeping the fits."""
