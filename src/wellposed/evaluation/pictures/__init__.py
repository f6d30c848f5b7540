"""Patch features as pictures."""
