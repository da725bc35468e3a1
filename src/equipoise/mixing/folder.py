"""Mixtures on disk: `mixture:DIR` holds `mixture.toml`, which refers to the two bases, and possibly
a gate."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from equipoise import __version__, models
from equipoise.core import checks, config, files
from equipoise.core.modes import outside_inference_mode
from equipoise.core.serialize import Share, from_plain, to_plain
from equipoise.mixing.bundle import bundle_base, shape_of_zoo_base
from equipoise.mixing.cascade import CascadedClassifier
from equipoise.mixing.classifier import MixedClassifier
from equipoise.mixing.gate import Gate
from equipoise.mixing.gated import GatedClassifier
from equipoise.mixing.logit_maps import LogitMap, LogitMapSettings
from equipoise.mixing.mixednuts import is_mixednuts, load_mixednuts
from equipoise.mixing.provenance import Frontier, Provenance
from equipoise.models import LoadOptions, Normalized, checkpoint
from equipoise.models.architectures import zoo
from equipoise.models.loaded import remember_reference
from equipoise.models.options import unescape
from equipoise.models.reference import innermost

NAME = "mixture.toml"
GATE = "gate.safetensors"


@dataclass(frozen=True)
class _Base:
    reference: str
    digest: str
    # The digest of the network that was traced for a bundle, whose names differ
    bundled_from: str | None = None


@dataclass(frozen=True)
class _GateSettings:
    alpha_max: float
    scale: float
    shift: float
    logit_scales: tuple[float, ...]

    def __post_init__(self) -> None:
        checks.require(
            len(self.logit_scales) == 2, "logit_scales", "be two numbers", self.logit_scales
        )


@dataclass(frozen=True)
class _MixtureFile:
    """The content of `mixture.toml`."""

    schema: int
    alpha: Share
    accurate: _Base
    robust: _Base
    version: str | None = None  # of Equipoise
    hard: bool = False
    surrogate_alpha: Share = 0.9
    accurate_temperature: float | None = None  # 1 if not given
    first_q: Share | None = None  # of a cascade
    first_scale: float | None = None  # of a cascade; that of the map if not given
    frontier: Frontier = ()
    logit_map: LogitMapSettings | None = None
    gate: _GateSettings | None = None
    provenance: Provenance | None = None


def save(
    path: Path | str,
    model: nn.Module,
    *,
    accurate: str | None = None,
    robust: str | None = None,
    bundle: bool = False,
    image_shape: tuple[int, int, int] | None = None,
) -> None:
    """Save a mixture into a folder (see :func:`save_mixture`), or a model of the zoo as a
    `.safetensors` checkpoint."""
    checks.path("path", checks.instance("path", path, (str, Path), "be a path"))
    for side, reference in (("accurate", accurate), ("robust", robust)):
        checks.optional(side, reference, str, "be a model reference")
    checks.require(isinstance(bundle, bool), "bundle", "be true or false", bundle)
    if isinstance(model, MixedClassifier):
        save_mixture(
            path, model, accurate=accurate, robust=robust, bundle=bundle, image_shape=image_shape
        )
        return
    checks.require(
        isinstance(model, Normalized),
        "model",
        "be a mixture or a model of the zoo",
        type(model).__name__,
    )
    checkpoint.save(path, model)


def save_mixture(
    folder: Path | str,
    mixture: MixedClassifier,
    *,
    accurate: str | None = None,
    robust: str | None = None,
    bundle: bool = False,
    image_shape: tuple[int, int, int] | None = None,
) -> None:
    """Write `mixture.toml`: the settings, and the model reference and digest of each base; a gate
    gets its own file.

    Args:
        folder: of the mixture. Paths of bases are stored relative to it: it can be moved together
            with them.
        mixture: to be saved.
        accurate, robust: references of the bases, by default those that they were loaded from. A
            base without one is written into the folder.
        bundle: write both bases into the folder, which then loads alone, on any machine.
        image_shape: (C, H, W), to bundle a network that is not of the zoo; by default that of the
            other base, if it is one of the zoo, or what is known from loading it.
    """
    folder = Path(folder)
    if image_shape is None:
        image_shape = shape_of_zoo_base(mixture.accurate, mixture.robust)
    bases = {}
    for side, given in (("accurate", accurate), ("robust", robust)):
        base = getattr(mixture, side)
        reference, digest = given or models.full_reference_of(base), models.weights_digest(base)
        if reference is not None and not bundle:
            bases[side] = _Base(
                models.relocate(reference, lambda path: os.path.relpath(path, folder)), digest
            )
            continue
        stored, bundled = bundle_base(folder, side, base, image_shape)
        bases[side] = _Base(stored, bundled, digest if bundled != digest else None)
    if isinstance(mixture, GatedClassifier):
        for side, written in bases.items():
            checks.require(
                written.bundled_from is None,
                side,
                "be a network of the zoo in a bundle with a gate, which reads its layers",
                type(getattr(mixture, side)).__name__,
            )
    folder.mkdir(parents=True, exist_ok=True)
    gate = None
    if isinstance(mixture, GatedClassifier):
        gate = _GateSettings(
            mixture.alpha_range[1], mixture.scale, mixture.shift, mixture.logit_scales
        )
        save_gate(folder / GATE, mixture.network, mixture.accurate, mixture.robust)
    content = _MixtureFile(
        config.SCHEMA,
        mixture.alpha,
        version=__version__,
        hard=mixture.hard,
        gate=gate,
        surrogate_alpha=mixture.surrogate_alpha,
        accurate_temperature=(
            None if mixture.accurate_temperature == 1 else mixture.accurate_temperature
        ),
        first_q=getattr(mixture, "first_q", None),
        first_scale=getattr(mixture, "first_scale", None),
        logit_map=None if mixture.logit_map is None else mixture.logit_map.settings,
        frontier=mixture.frontier,
        provenance=mixture.provenance,
        **bases,
    )
    files.write_atomic(folder / NAME, config.dumps(to_plain(content)))


def is_bundle(folder: Path) -> bool:
    """Whether a mixture folder holds both of its bases."""
    content = _read(folder / NAME)
    return all(
        innermost(models.parse(base.reference)).body.startswith(f"{side}.")
        for side, base in (("accurate", content.accurate), ("robust", content.robust))
    )


@outside_inference_mode
def load_model(
    reference: str | Path, options: LoadOptions | None = None, **settings: Any
) -> nn.Module:
    """Load a model from any reference, in evaluation mode.

    Args:
        reference: `mixture:DIR` (or the bare folder), or one of :data:`equipoise.models.SCHEMES`.
        options, settings: as for :func:`equipoise.models.load`; those of a mixture are used for
            both bases. A base that runs code, such as `python:MODULE:NAME` in a mixture folder,
            needs `allow_code=True`.
    """
    reference = str(checks.instance("model", reference, (str, Path), "be a reference or a path"))
    checks.require(
        "\0" not in reference, "model", "be a reference without null characters", reference
    )
    checks.optional("options", options, LoadOptions, "be LoadOptions")
    address, (scheme, colon, body) = reference.partition("?")[0], reference.partition(":")
    if (colon and scheme == "mixture") or files.exists(Path(reference) / NAME):
        mixture = load_mixture(
            Path(body if scheme == "mixture" else reference), options, **settings
        )
        remember_reference(mixture, reference)
        return mixture
    if scheme == "robustbench" and is_mixednuts(body.partition("?")[0]):
        parsed = models.parse(reference)
        mixture = load_mixednuts(parsed.body, parsed.settings)
        remember_reference(mixture, reference)
        return mixture
    if (
        colon
        and scheme not in models.SCHEMES
        and not any(map(files.exists, (reference, unescape(address))))
    ):
        checks.one_of("scheme of a model", scheme, [*models.SCHEMES, "mixture"])
    return models.load(reference, options, **settings)


def load_mixture(
    folder: Path,
    options: LoadOptions | None = None,
    *,
    bases: tuple[nn.Module, nn.Module] | None = None,
    **settings: Any,
) -> MixedClassifier:
    """Load the mixture of a folder; `bases` are used instead of loading them, and must have the
    saved weights."""
    path = folder / NAME
    if not path.exists():
        hint = "" if folder.exists() else files.near_miss(folder)
        raise checks.InputError(
            f"`mixture` must be a folder that holds {NAME}, got {checks.shown(str(folder))}{hint}"
        )
    content = _read(path)
    given = (None, None) if bases is None else bases
    sides = {"accurate": (content.accurate, given[0]), "robust": (content.robust, given[1])}
    # Digests of weights are checked before any code runs.
    order = sorted(sides, key=lambda side: models.runs_code(sides[side][0].reference))
    loaded = {side: _load_base(path, side, *sides[side], options, settings) for side in order}
    accurate, robust = loaded["accurate"], loaded["robust"]
    gate = None if content.gate is None else load_gate(folder / GATE, accurate, robust)
    try:
        return _build(content, accurate, robust, gate).eval()
    except checks.InputError as error:
        raise checks.InputError(f"{error}, in {path}") from None


def _build(
    content: _MixtureFile, accurate: nn.Module, robust: nn.Module, gate: Gate | None
) -> MixedClassifier:
    shared: dict[str, Any] = {
        "logit_map": content.logit_map and LogitMap(**asdict(content.logit_map)),
        "surrogate_alpha": content.surrogate_alpha,
        "provenance": content.provenance,
    }
    if content.first_q is not None:
        checks.require(
            content.hard and gate is None,
            "first_q",
            "come with hard labels and without a gate",
            content.first_q,
        )
        return CascadedClassifier(
            accurate,
            robust,
            content.alpha,
            first_q=content.first_q,
            first_scale=content.first_scale,
            frontier=content.frontier,
            **shared,
        )
    checks.require(
        content.first_scale is None, "first_scale", "come with first_q", content.first_scale
    )
    shared["hard"] = content.hard
    if gate is None or content.gate is None:
        temperature = 1.0 if content.accurate_temperature is None else content.accurate_temperature
        return MixedClassifier(
            accurate,
            robust,
            content.alpha,
            frontier=content.frontier,
            accurate_temperature=temperature,
            **shared,
        )
    return GatedClassifier(
        accurate, robust, gate, alpha_min=content.alpha, **asdict(content.gate), **shared
    )


def _read(path: Path) -> _MixtureFile:
    table = config.read(path)
    config.check_schema(table, path)
    return from_plain(_MixtureFile, table, str(path))


def _load_base(
    path: Path,
    side: str,
    base: _Base,
    given: nn.Module | None,
    options: LoadOptions | None,
    settings: Mapping[str, Any],
) -> nn.Module:
    reference = models.relocate(base.reference, lambda relative: str(path.parent / relative))
    model = (
        models.load(reference, options, folder=path.parent, **settings) if given is None else given
    )
    if models.weights_digest(model) not in (
        base.digest,
        *([] if given is None else [base.bundled_from]),
    ):
        raise checks.InputError(
            f"the {side} base {reference} must be the one {path} was saved with, but its weights "
            "have changed"
        )
    return model


def save_gate(
    path: Path | str,
    gate: Gate,
    accurate: nn.Module,
    robust: nn.Module,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write the gate alone; its metadata hold its feature layers and the digests of the bases it
    was trained for."""
    own = {
        "feature_layers": ";".join(",".join(names) for names in gate.feature_layers),
        "shape": ",".join(map(str, gate.shape)),
        "accurate": models.weights_digest(accurate),
        "robust": models.weights_digest(robust),
    }
    checkpoint.write_safetensors(Path(path), gate.state_dict(), {**(metadata or {}), **own})


def load_gate(path: Path | str, accurate: nn.Module, robust: nn.Module) -> Gate:
    """Load a gate, in evaluation mode; bases other than those it was trained for are an error."""
    state, metadata = checkpoint.read_safetensors(Path(path))
    missing = [
        key for key in ("feature_layers", "shape", "accurate", "robust") if not metadata.get(key)
    ]
    checks.require(
        not missing, str(path), "hold a gate, with " + ", ".join(missing), sorted(metadata)
    )
    for side, base in (("accurate", accurate), ("robust", robust)):
        digest = models.weights_digest(base)
        checks.require(
            digest == metadata[side],
            side,
            f"be the base that {path} was trained for, with weights {metadata[side][:12]}",
            digest[:12],
        )
    layers = tuple(tuple(names.split(",")) for names in metadata["feature_layers"].split(";"))
    try:
        (first, second), (shallow, deep, width) = (
            layers,
            checkpoint.parse_sizes(metadata["shape"], 3),
        )
        with torch.device("meta"):  # a few digits cannot ask for more memory than the file fills
            gate = Gate(((first[0], first[1]), (second[0], second[1])), shallow, deep, width)
    except (
        ValueError,
        IndexError,
        RuntimeError,
    ):  # RuntimeError: more weights than 64 bits can count
        stored = {key: metadata[key] for key in ("feature_layers", "shape")}
        raise checks.InputError(
            f"`{path}` must have feature_layers like a,b;a,b and a shape like 32,64,8, got {stored}"
        ) from None
    expected = {key: (value.shape, value.dtype) for key, value in gate.state_dict().items()}
    checks.require(
        {key: (value.shape, value.dtype) for key, value in state.items()} == expected,
        str(path),
        f"hold the {len(expected)} tensors of this gate",
        f"{len(state)}, not all of their names and shapes",
    )
    zoo.allocate(gate)
    gate.load_state_dict(state)
    return gate.eval()
