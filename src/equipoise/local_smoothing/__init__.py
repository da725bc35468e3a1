"""Locally biased smoothing: the mixing rules that preceded the mixed classifier, their oracles, policy and radii."""
