"""The experiments of five papers and a comparison of mixing rules, outside of the package.

They call the public functions, and functions and classes of its packages where those do not suffice.
"""
