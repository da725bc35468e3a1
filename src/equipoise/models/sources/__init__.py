"""Where models come from: a module per scheme of references, imported when the scheme is first
used."""
