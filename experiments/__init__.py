"""The experiments of five papers and a comparison of mixing rules, on the public API of Equipoise."""
