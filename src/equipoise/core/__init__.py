"""Shared foundations: threats, random streams, geometry, losses, statistics, run folders and
settings."""
