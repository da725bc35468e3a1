"""MixedNUTS: nonlinear mixing without training."""
