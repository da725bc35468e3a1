"""Text from elsewhere, such as the names of models, classes and files, shown literally."""

from __future__ import annotations

import re
import unicodedata

# Control and formatting characters (escapes, text direction), lone surrogates of undecodable file names, line breaks.
_INVISIBLE = ("Cc", "Cf", "Cs", "Zl", "Zp")


def literal(text: str, keep: str = "") -> str:
    r"""The text with control and invisible formatting characters, except those in `keep`, as visible escapes.

    >>> print(literal("a\x1b[31m\n"))
    a\x1b[31m\n
    """
    if text.isprintable():
        return text
    return "".join(character if character in keep or unicodedata.category(character) not in _INVISIBLE else
                   character.encode("unicode_escape").decode("ascii") for character in text)


def slug(text: str) -> str:
    """A name as that of a folder: small letters, digits, dots and hyphens.

    >>> slug("TRADES, weight 0.3")
    'trades-weight-0.3'
    """
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.")
