"""Modules around a network: normalisation, resizing, choice of classes, test-time augmentation,
smoothing."""
