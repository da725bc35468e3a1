"""The command line: each command parses options, calls the public function of its name, and prints
the result."""
