"""`hf:ORGANISATION/NAME[@REVISION]` from the Hugging Face Hub or its cache, `hf:./FOLDER` from a
folder.

`config.json` says what it is: a model of timm or one of transformers. With `?arch=` there are
weights for an architecture of the zoo, as `PyTorchModelHubMixin` saves them. Code of a repository
is never run.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from equipoise.core import checks, files
from equipoise.core.checks import InputError
from equipoise.models import checkpoint
from equipoise.models.inspection import one_line
from equipoise.models.loaded import LoadedModel, ModelInfo
from equipoise.models.options import expand_home, is_explicit_path
from equipoise.models.sources import hf_processors, hub, timm_models
from equipoise.models.sources.config_table import all_keys, read_json
from equipoise.models.sources.hub import WeightFile
from equipoise.models.torch_files import abbreviate

if TYPE_CHECKING:
    from equipoise.models.options import LoadOptions
    from equipoise.models.reference import Reference

# Keys with which a config.json makes transformers run code of a repository, compiled kernels or
# quantisation.
_REFUSED = (
    "attn_implementation",
    "attn_implementation_internal",
    "auto_map",
    "quantization_config",
    "compression_config",
    "use_kernels",
)


def load(reference: Reference, options: LoadOptions) -> nn.Module | LoadedModel:
    """The model of a repository or a folder."""
    settings, name = reference.settings, reference.body
    if settings.arch is not None or _has_metadata(name):
        weights = (
            _file(name, hub.WEIGHTS[:1]) if settings.arch is None else _file(name, hub.WEIGHTS)
        )
        given: dict[str, Any] = {
            key: getattr(options, key) for key in ("num_classes", "image_shape", "mean", "std")
        }
        return checkpoint.describe_file(
            checkpoint.load(weights.path, settings.arch, **given), weights.path, options
        )
    for key in ("num_classes", "image_shape"):
        checks.require(
            getattr(settings, key) is None,
            key,
            f"be left out for {name}, which has its own",
            getattr(settings, key),
        )
    config = read_json(_file(name, ("config.json",)).path)
    architecture, classes = config.get("architecture"), config.get("architectures")
    if isinstance(architecture, str):
        timm = hub.require_package("timm", "hf")
        checks.one_of("timm model", architecture.partition(".")[0], timm.list_models())
        checks.require(
            re.fullmatch(r"[\w.-]+", architecture) is not None,
            "architecture",
            "be a name",
            architecture,
        )
        return timm_models.build(
            timm,
            architecture,
            _pretrained_config(config),
            _file(name, hub.WEIGHTS),
            "config.json",
            **_model_arguments(timm, config),
        )
    if isinstance(classes, list) and any(
        str(one).endswith("ForImageClassification") for one in classes
    ):
        return _load_transformers(name, config)
    raise InputError(
        f"`{reference.text}` must be an image classifier of timm or transformers, got a config.json with "
        f"{checks.shown(architecture or classes or sorted(config)[:5])}; ?arch=NAME reads weights for an "
        "architecture of the zoo"
    )


def _file(name: str, candidates: tuple[str, ...]) -> WeightFile:
    """The first of these files of a folder or a repository."""
    if not is_explicit_path(name):
        return hub.find_file(name, candidates)
    folder = Path(expand_home(name))
    if not files.exists(folder) or not folder.is_dir():
        raise InputError(
            f"`model` must be a folder that exists, got {checks.shown(name)}{files.near_miss(folder)}"
        )
    path = next((folder / file for file in candidates if (folder / file).is_file()), None)
    if path is None:
        present = sorted(entry.name for entry in folder.iterdir())
        raise InputError(
            f"`{name}` must hold {' or '.join(candidates)}, got {checks.shown(present)}"
        )
    return hub.check_blob(path)


def _has_metadata(name: str) -> bool:
    """Whether the weights are a checkpoint of this package, which describes itself."""
    try:
        path = _file(name, hub.WEIGHTS[:1]).path
    except InputError:  # larger models have their weights in several files
        return False
    return set(checkpoint.REQUIRED) <= checkpoint.read_metadata(path).keys()


def _pretrained_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The `pretrained_cfg` of a config.json of timm, also of older ones, whose keys are those of
    the file itself."""
    nested = config.get("pretrained_cfg")
    merged = {**(nested if isinstance(nested, dict) else config)}
    for key in ("num_classes", "label_names"):
        if key in config:
            merged[key] = config[key]
    merged.setdefault("label_names", merged.get("labels"))
    return merged


def _model_arguments(timm: Any, config: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of the architecture's own class; those of timm's function could make it read other
    files."""
    arguments = config.get("model_args") or {}
    checks.require(
        isinstance(arguments, dict), "model_args", "be a table in config.json", arguments
    )
    for key in arguments:
        checks.require(
            key not in inspect.signature(timm.create_model).parameters
            and not key.startswith("pretrained"),
            "model_args",
            "hold arguments of the architecture only in config.json",
            key,
        )
    return dict(arguments)


def _load_transformers(name: str, config: Mapping[str, Any]) -> LoadedModel:
    transformers = hub.require_package("transformers", "hf")
    for key in all_keys(config):
        checks.require(
            key.lstrip("_") not in _REFUSED,
            name,
            "be a plain model: transformers would run other code because of its config.json",
            key,
        )
    weights, processor = _file(name, hub.WEIGHTS[:1]), _file(name, (hf_processors.FILE,))
    folder = weights.path.parent
    checks.require(
        not (folder / "adapter_config.json").exists(),
        name,
        "be a whole model, not an adapter of another",
        "adapter_config.json",
    )
    used = hf_processors.processor_settings(read_json(processor.path), config.get("model_type"))
    try:
        with hub.offline():
            network, report = transformers.AutoModelForImageClassification.from_pretrained(
                str(folder),
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                dtype=torch.float32,
                attn_implementation="eager",
                output_loading_info=True,
            )
    except Exception as error:  # an unknown type, a file of another architecture
        raise InputError(
            f"`{name}` must hold an image classifier that transformers can load, but it raised "
            f"{one_line(error)}"
        ) from error
    for problem in (
        "missing",
        "unexpected",
        "mismatched",
    ):  # transformers fills them with random numbers
        keys = sorted(
            key if isinstance(key, str) else str(key[0])
            for key in report.get(f"{problem}_keys") or ()
        )
        if keys:
            raise InputError(
                f"`{weights.path}` must hold exactly the weights of {type(network).__name__}, got "
                f"{problem} {abbreviate(keys)}"
            )
    labels = config.get("id2label") if isinstance(config.get("id2label"), dict) else {}
    names = (
        tuple(str(labels[str(number)]) for number in range(len(labels)))
        if labels and all(str(number) in labels for number in range(len(labels)))
        else ()
    )
    side = (
        used.crop
        if used.crop is not None
        else used.resize
        if isinstance(used.resize, tuple)
        else None
    )
    info = ModelInfo(
        type(network).__name__,
        getattr(network.config, "num_labels", None) or len(names) or None,
        None if side is None else (3, *side),
        origin=str(weights),
        class_names=names,
    )
    return LoadedModel(network.float(), info, preprocessing=used)
