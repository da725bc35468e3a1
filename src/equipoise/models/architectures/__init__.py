"""Networks that this package implements, and the zoo that builds them by name."""
