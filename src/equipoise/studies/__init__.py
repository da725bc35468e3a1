"""Whole stories told with the rooms below."""
