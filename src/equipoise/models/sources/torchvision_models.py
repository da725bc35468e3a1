"""`torchvision:NAME`: a classifier of torchvision with its published weights,
`?weights=IMAGENET1K_V1` or a file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from equipoise.core import checks
from equipoise.core.checks import InputError
from equipoise.models import checkpoint
from equipoise.models.inspection import one_line
from equipoise.models.layers.resizing import Preprocessing
from equipoise.models.loaded import LoadedModel, ModelInfo
from equipoise.models.options import is_explicit_path
from equipoise.models.sources import hub
from equipoise.models.sources.hub import WeightFile
from equipoise.models.torch_files import only_weights

if TYPE_CHECKING:
    from equipoise.models.options import LoadOptions
    from equipoise.models.reference import Reference


def load(reference: Reference, options: LoadOptions) -> LoadedModel:
    """The network behind the preprocessing of its weights; with weights from a file, that of the
    default weights."""
    package = hub.require_package("torchvision", "torchvision")
    models, settings = package.models, reference.settings
    name = checks.one_of("torchvision model", reference.body, models.list_models(module=models))
    published = models.get_model_weights(name)
    given = settings.weights
    entry = None if given is None or is_explicit_path(given) else given.rpartition(".")[2]
    if entry is not None:
        checks.one_of(f"weights of {name}", entry, list(published.__members__))
    weights = published["DEFAULT"] if entry is None else published[entry]
    if given is not None and entry is None:
        return _with_file(package, name, hub.local_file(given), weights, settings.num_classes)
    checks.require(
        settings.num_classes is None,
        "num_classes",
        "be left out for published weights, which have their own",
        settings.num_classes,
    )
    file = hub.torch_file(weights.url)
    try:
        with only_weights():  # torchvision itself would unpickle anything
            network = models.get_model(name, weights=weights)
    except Exception as error:
        file.read()  # says what is wrong with the file
        raise InputError(
            f"`{file.path}` must hold the weights of {name}, but torchvision raised {one_line(error)}"
        ) from error
    names = tuple(map(str, weights.meta.get("categories", ())))
    return _loaded(network, name, weights, len(names) or None, names, str(file))


def _with_file(
    package: Any, name: str, file: WeightFile, weights: Any, num_classes: int | None
) -> LoadedModel:
    count = len(weights.meta.get("categories", ())) if num_classes is None else num_classes
    state = file.read()
    network = package.models.get_model(
        name, weights=None, num_classes=count, **_own_arguments(name, state)
    )
    checkpoint.copy_weights(file.path, network, state, name)
    return _loaded(network, name, weights, count, (), str(file))


def _own_arguments(name: str, state: Mapping[str, Tensor]) -> dict[str, bool]:
    """As torchvision builds the Inceptions for published weights: they change the normalisation on
    their own."""
    if name not in ("inception_v3", "googlenet"):
        return {}
    auxiliary = any(key.startswith(("AuxLogits.", "aux1.")) for key in state)
    return {"transform_input": True, "aux_logits": auxiliary, "init_weights": False}


def _loaded(
    network: Any, name: str, weights: Any, count: int | None, names: tuple[str, ...], origin: str
) -> LoadedModel:
    preset = weights.transforms()
    try:
        preprocessing = Preprocessing(
            resize=_one(preset.resize_size),
            crop=(_one(preset.crop_size),) * 2,
            mean=tuple(preset.mean),
            std=tuple(preset.std),
            interpolation=getattr(preset.interpolation, "value", "bilinear"),
            antialias=bool(getattr(preset, "antialias", True)),
            origin=f"{type(weights).__name__}.{weights.name}",
        )
    except AttributeError as error:
        raise InputError(
            f"`{name}` must be a classifier of images, got weights with other preprocessing "
            f"({error})"
        ) from None
    side = _one(preset.crop_size)
    info = ModelInfo(name, count, (3, side, side), origin=origin, class_names=names)
    return LoadedModel(network, info, preprocessing=preprocessing)


def _one(sizes: Any) -> int:
    """The side of a square, which torchvision stores as a list of one."""
    return int(sizes[0] if isinstance(sizes, list | tuple) else sizes)
