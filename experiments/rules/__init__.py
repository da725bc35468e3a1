"""A comparison of all rules for mixing on one pair of models."""
