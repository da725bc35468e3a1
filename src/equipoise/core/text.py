"""Text from elsewhere, such as the names of models, classes and files, shown literally."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable

# Control and formatting characters (escapes, text direction), lone surrogates of undecodable file
# names, line breaks.
_INVISIBLE = ("Cc", "Cf", "Cs", "Zl", "Zp")


def literal(text: str, keep: str = "") -> str:
    r"""The text with control and invisible formatting characters, except those in `keep`, as
    visible escapes.

    >>> print(literal("a\x1b[31m\n"))
    a\x1b[31m\n
    """
    if text.isprintable():
        return text
    return "".join(
        character
        if character in keep or unicodedata.category(character) not in _INVISIBLE
        else character.encode("unicode_escape").decode("ascii")
        for character in text
    )


def slug(text: str) -> str:
    """A name as that of a folder: small letters, digits, dots and hyphens.

    >>> slug("TRADES, weight 0.3")
    'trades-weight-0.3'
    """
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.")


_WRAPPERS = re.compile(r"(?:(?:smoothed|tta):[^:]*:)+")  # around the reference of a model


def is_reference(name: str) -> bool:
    """Whether a name is a path or a reference such as `file:PATH`; any other is shown as it is."""
    return re.match(r"\w+:|[\w.~-]*/", name) is not None


def short_names(models: Iterable[str]) -> dict[str, str]:
    """Short model names: as much of the end of each path as distinguishes them, without the file
    extension.

    Settings, which follow a question mark, are shown where a path comes with several. What wraps a
    model, such as `smoothed:0.5:`, is always shown: it is another classifier.

    >>> short_names(["file:/a/b/last.pt", "file:/a/c/last.pt (alpha 0.8)"])
    {'file:/a/b/last.pt': 'b/last', 'file:/a/c/last.pt (alpha 0.8)': 'c/last (alpha 0.8)'}
    >>> short_names(["onnx:a/net.onnx?std=1/255,1/255,1/255"])
    {'onnx:a/net.onnx?std=1/255,1/255,1/255': 'net.onnx'}
    >>> short_names(["file:/a/net.pt", "smoothed:0.5:file:/a/net.pt"])
    {'file:/a/net.pt': 'net', 'smoothed:0.5:file:/a/net.pt': 'smoothed:0.5:net'}
    """
    models = list(models)
    wrappers = {name: match[0] if (match := _WRAPPERS.match(name)) else "" for name in models}
    split = {name: name.removeprefix(wrappers[name]).partition(" (") for name in models}
    references = {reference for reference, _, _ in split.values()}
    repeated = Counter(reference.partition("?")[0] for reference in references)
    paths = {path: path.split("/") if is_reference(path) else [path] for path in repeated}
    depth, deepest = 1, max(map(len, paths.values()), default=1)
    while depth < deepest and len({"/".join(parts[-depth:]) for parts in paths.values()}) < len(
        paths
    ):
        depth += 1
    short = {}
    for name, (reference, mark, rest) in split.items():
        path, question, settings = reference.partition("?")
        own = re.sub(r"\.(safetensors|pth?)$", "", "/".join(paths[path][-depth:]))
        short[name] = literal(
            wrappers[name] + own + (question + settings if repeated[path] > 1 else "") + mark + rest
        )
    return short
