"""`timm:NAME`: a classifier of timm with its published weights, or with those of
`?weights=FILE`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from equipoise.core import checks
from equipoise.core.checks import InputError
from equipoise.models import checkpoint
from equipoise.models.inspection import one_line
from equipoise.models.layers.resizing import MAX_SIDE, Preprocessing
from equipoise.models.loaded import LoadedModel, ModelInfo
from equipoise.models.sources import hub
from equipoise.models.sources.config_table import ConfigTable
from equipoise.models.sources.hub import WeightFile
from equipoise.models.torch_files import only_weights

if TYPE_CHECKING:
    from equipoise.models.options import LoadOptions
    from equipoise.models.reference import Reference


def load(reference: Reference, options: LoadOptions) -> LoadedModel:
    """The network behind the preprocessing of its `pretrained_cfg`."""
    timm = hub.require_package("timm", "timm")
    name, settings = reference.body, reference.settings
    if not timm.is_model(name) or name.partition(".")[2]:
        checks.one_of("timm model", name, {*timm.list_models(), *timm.list_pretrained()})
    known = timm.get_pretrained_cfg(name)
    config = {} if known is None else known.to_dict()
    if settings.num_classes is not None:
        checks.require(
            settings.weights is not None,
            "num_classes",
            "come with weights=FILE: published weights have their own",
            settings.num_classes,
        )
        config["num_classes"] = settings.num_classes
    file = (
        _published(name, config) if settings.weights is None else hub.local_file(settings.weights)
    )
    return build(timm, name, config, file, "pretrained_cfg of timm")


def _published(name: str, config: Mapping[str, Any]) -> WeightFile:
    """The file of the published weights."""
    repository, file = config.get("hf_hub_id"), config.get("hf_hub_filename")
    special = config.get("custom_load")  # of the file at the URL; "hf" of that of the repository
    if not (repository or config.get("url")) or special == "hf" or (special and not repository):
        raise InputError(
            f"`{name}` must have published weights in the format of torch, got none; give ?weights=FILE"
        )
    if not repository:
        return hub.torch_file(str(config["url"]))
    names = (
        hub.WEIGHTS
        if file is None
        else (file.replace("pytorch_model.bin", "model.safetensors"), file)
    )
    return hub.find_file(repository, names)


def build(
    timm: Any, name: str, config: Mapping[str, Any], file: WeightFile, origin: str, **arguments: Any
) -> LoadedModel:
    """The network of an architecture and of its `pretrained_cfg`, with the weights of a file.

    Timm converts the weights of other publishers by itself and loads them strictly.
    """
    table = ConfigTable(config, origin)
    count, (channels, height, width) = (
        table.whole("num_classes", 0, least=0, most=checks.MAX_CLASSES),
        _shape(table),
    )
    checks.require(count >= 2, name, "be a classifier", f"{count} classes")
    used, state = preprocessing(config, origin), file.read()
    overlay = {
        key: config[key]
        for key in (
            "input_size",
            "mean",
            "std",
            "interpolation",
            "crop_pct",
            "crop_mode",
            "num_classes",
            "fixed_input_size",
            "label_offset",
        )
        if key in config
    }
    try:
        with only_weights():
            network = timm.create_model(
                name,
                pretrained=True,
                num_classes=count,
                **arguments,
                pretrained_cfg_overlay={**overlay, "state_dict": state, "custom_load": False},
            )
    except Exception as error:
        _explain(timm, name, count, file, state, arguments)
        raise InputError(
            f"`{file.path}` must hold the weights of {name}, but timm raised {one_line(error)}"
        ) from None
    network.pretrained_cfg.pop("state_dict", None)  # timm would keep a second copy of the weights
    names = config.get("label_names")
    names = (
        list(names.values() if isinstance(names, Mapping) else names)
        if isinstance(names, Mapping | list | tuple)
        else []
    )
    info = ModelInfo(
        str(name),
        count,
        (channels, height, width),
        origin=str(file),
        class_names=tuple(map(str, names)) if len(names) == count else (),
    )
    return LoadedModel(network, info, preprocessing=used)


def _explain(
    timm: Any,
    name: str,
    count: int,
    file: WeightFile,
    state: dict[str, Tensor],
    arguments: Mapping[str, Any],
) -> None:
    """Raise an error that names the weights which differ, if the architecture itself can be
    built."""
    try:
        network = timm.create_model(name, pretrained=False, num_classes=count, **arguments)
    except Exception:
        return
    checkpoint.copy_weights(file.path, network, state, name)


def preprocessing(config: Mapping[str, Any], origin: str) -> Preprocessing:
    """The preprocessing of a `pretrained_cfg`: resize by 1 / crop_pct, then crop.

    `crop_mode` says whether that is the shorter side ("center"), each side ("squash"), or the
    longer side with a border of the mean colour ("border").
    """
    table = ConfigTable(config, origin)
    _, height, width = _shape(table)
    share, mode = table.share("crop_pct", 0.875), table.get("crop_mode", "center")
    checks.one_of(table.name("crop_mode"), mode, ("center", "squash", "border"))
    checks.require(
        mode == "squash" or height == width,
        table.name("input_size"),
        f"be square, because crop_mode is {mode}",
        (height, width),
    )
    interpolation = table.get("interpolation", "bicubic")
    sides = math.floor(height / share), math.floor(width / share)
    mean, std = table.normalization("mean", "std", ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    return Preprocessing(
        resize=sides if mode == "squash" else sides[0],
        fit=mode == "border",
        crop=(height, width),
        fill=tuple(round(255 * value) / 255 for value in mean) if mode == "border" else None,
        interpolation="bicubic" if interpolation == "random" else interpolation,
        mean=mean,
        std=std,
        origin=origin,
    )


def _shape(table: ConfigTable) -> tuple[int, int, int]:
    size = table.get("input_size", (3, 224, 224))
    checks.require(
        isinstance(size, list | tuple) and len(size) == 3,
        table.name("input_size"),
        "be (C, H, W)",
        size,
    )
    channels, height, width = (
        checks.whole(table.name("input_size"), side, least=1, most=MAX_SIDE) for side in size
    )
    return channels, height, width
