from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save, save_file
from torch import Tensor, nn

from equipoise.core import checks
from equipoise.core.checks import InputError
from equipoise.models import Normalized, build, checkpoint, weights_digest
from equipoise.models.architectures import zoo

MEAN, STD = [0.4, 0.5, 0.6], [0.2, 0.25, 0.3]


@pytest.fixture
def model() -> Normalized:
    """A ResNet-8 after one forward pass in training mode, so that its running statistics are not
    the initial ones."""
    net = build("resnet8", num_classes=6, image_shape=(3, 8, 9), mean=MEAN, std=STD, seed=1)
    net.train()(torch.rand(4, 3, 8, 9, generator=torch.Generator().manual_seed(0)))
    return net


@pytest.fixture
def file(model: Normalized, tmp_path: Path) -> Path:
    path = tmp_path / "net.safetensors"
    checkpoint.save(path, model, {"trained": "one forward, ℓ∞"})
    return path


def rewrite(
    file: Path, change: Callable[[dict[str, Tensor]], None], **metadata: str | None
) -> Path:
    """The file with its tensors changed and metadata replaced or, by None, removed."""
    state = load_file(file)
    change(state)
    merged: dict[str, str | None] = {**checkpoint.read_metadata(file), **metadata}
    save_file(state, file, {key: value for key, value in merged.items() if value is not None})
    return file


def unchanged(_: dict[str, Tensor]) -> None:
    pass


def assert_refused(path: Path, *parts: str, **options: Any) -> None:
    """Loading raises an error of one sentence that names the file and contains all `parts`."""
    with pytest.raises(InputError) as caught:
        checkpoint.load(path, **options)
    text = str(caught.value)
    assert "\n" not in text
    for part in (str(path), *parts):
        assert part in text, text


def test_round_trip_is_exact(model: Normalized, file: Path, tmp_path: Path) -> None:
    loaded = checkpoint.load(file)
    assert not any(sub.training for sub in loaded.modules())
    assert weights_digest(loaded) == weights_digest(model)
    again = tmp_path / "again.safetensors"
    checkpoint.save(again, loaded, {"trained": "one forward, ℓ∞"})
    assert again.read_bytes() == file.read_bytes()


def test_metadata_are_read_back(file: Path) -> None:
    assert checkpoint.read_metadata(file) == {
        "arch": "resnet8",
        "num_classes": "6",
        "image_shape": "3,8,9",
        "trained": "one forward, ℓ∞",
    }


def test_half_precision_keeps_small_tensors_and_comes_back_as_fp32(
    model: Normalized, tmp_path: Path
) -> None:
    path = tmp_path / "half.safetensors"
    checkpoint.save(path, model, {}, half=True)
    stored, loaded = load_file(path), checkpoint.load(path).state_dict()
    assert stored["conv1.weight"].dtype == torch.float16
    assert stored["mean"].dtype == stored["bn1.running_var"].dtype == torch.float32
    for key, value in model.state_dict().items():
        expected = value.half().float() if stored[key].dtype == torch.float16 else value
        assert loaded[key].dtype == value.dtype
        assert torch.equal(loaded[key], expected), key


def test_weights_beyond_half_precision_are_refused(model: Normalized, tmp_path: Path) -> None:
    with torch.no_grad():
        model.get_parameter("fc.weight")[0, 0] = 1e6
    with pytest.raises(InputError, match=r"`fc.weight` must fit into half precision"):
        checkpoint.save(tmp_path / "half.safetensors", model, {}, half=True)


def test_saving_does_not_touch_the_model(model: Normalized, tmp_path: Path) -> None:
    before = weights_digest(model)
    checkpoint.save(tmp_path / "a.safetensors", model, {}, half=True)
    assert weights_digest(model) == before
    assert model.training


def test_channels_last_weights_are_saved(model: Normalized, file: Path, tmp_path: Path) -> None:
    other = tmp_path / "last.safetensors"
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    checkpoint.save(other, model, {"trained": "one forward, ℓ∞"})
    assert other.read_bytes() == file.read_bytes()


def test_a_failed_write_leaves_the_old_file_and_no_other(
    model: Normalized, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = file.read_bytes()

    def full(_: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="disk full"):
        checkpoint.save(file, model, {"trained": "more"})
    assert file.read_bytes() == before
    assert list(file.parent.iterdir()) == [file]


def test_loading_leaves_the_global_random_state_alone(file: Path) -> None:
    before = torch.get_rng_state()
    checkpoint.load(file)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_module_from_elsewhere_needs_metadata(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="`metadata` must hold arch"):
        checkpoint.save(tmp_path / "a.safetensors", nn.Linear(2, 3), {})


def test_metadata_must_agree_with_the_model(model: Normalized, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="`arch` must be 'resnet8'"):
        checkpoint.save(tmp_path / "a.safetensors", model, {"arch": "resnet18"})


def test_other_suffixes_are_not_written(model: Normalized, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"end with \.safetensors"):
        checkpoint.save(tmp_path / "a.pt", model, {})


def test_counters_of_batch_norm_may_be_missing(model: Normalized, file: Path) -> None:
    def without_counters(state: dict[str, Tensor]) -> None:
        for key in [key for key in state if key.endswith("num_batches_tracked")]:
            del state[key]

    loaded = checkpoint.load(rewrite(file, without_counters)).state_dict()
    assert torch.equal(loaded["bn1.running_mean"], model.state_dict()["bn1.running_mean"])
    assert loaded["bn1.num_batches_tracked"] == 0


def test_missing_weights(file: Path) -> None:
    assert_refused(
        rewrite(file, lambda state: state.__delitem__("fc.bias")), "got no fc.bias", "resnet8"
    )


def test_unexpected_weights(file: Path) -> None:
    assert_refused(
        rewrite(file, lambda state: state.update(extra=torch.zeros(2))), "the unknown extra"
    )


def test_wrong_shapes(file: Path) -> None:
    assert_refused(
        rewrite(file, lambda state: state.update({"fc.bias": torch.zeros(7)})), "shape", "fc.bias"
    )


def test_integers_in_place_of_weights(file: Path) -> None:
    integers = torch.zeros(6, dtype=torch.int64)
    assert_refused(
        rewrite(file, lambda state: state.update({"fc.bias": integers})), "type", "fc.bias"
    )


@pytest.mark.parametrize("left", [0, 4, 200, -1])
def test_truncated_file(file: Path, left: int) -> None:
    file.write_bytes(file.read_bytes()[:left])
    assert_refused(file, "whole safetensors file")
    with pytest.raises(InputError, match="whole safetensors file"):
        checkpoint.read_metadata(file)


def test_foreign_file(tmp_path: Path) -> None:
    path = tmp_path / "net.safetensors"
    path.write_text("<html>not found</html>" * 10)
    assert_refused(path, "whole safetensors file")


def test_no_file_and_a_folder(tmp_path: Path) -> None:
    assert_refused(tmp_path / "none.safetensors", "must be a file that exists")
    assert_refused(tmp_path / "none.pt", "must be a file that exists", arch="resnet8")
    assert_refused(tmp_path, "a folder")
    with pytest.raises(InputError, match="must be a file that exists"):
        checkpoint.read_metadata(tmp_path / "none.pt")


@pytest.mark.parametrize("key", ["arch", "num_classes", "image_shape"])
def test_missing_metadata(file: Path, key: str) -> None:
    assert_refused(rewrite(file, unchanged, **{key: None}), f"must have {key} in its metadata")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_classes", "ten"),
        ("num_classes", "-6"),
        ("image_shape", "3,8"),
        ("image_shape", "3,8,x"),
        ("image_shape", "0,8,9"),
        ("arch", "resnet9"),
    ],
)
def test_invalid_metadata(file: Path, key: str, value: str) -> None:
    assert_refused(rewrite(file, unchanged, **{key: value}), key, value.split(",")[0])


def test_a_huge_number_of_classes_allocates_no_memory(file: Path) -> None:
    assert_refused(rewrite(file, unchanged, num_classes="100000"), "another shape", "fc.weight")
    assert_refused(rewrite(file, unchanged, num_classes="1000000000000"), "num_classes like 10")


@pytest.mark.parametrize(
    "option",
    [
        {"arch": "resnet18"},
        {"num_classes": 10},
        {"image_shape": (3, 32, 32)},
        {"mean": [0.1, 0.5, 0.6]},
    ],
)
def test_arguments_must_agree_with_the_file(file: Path, option: dict[str, Any]) -> None:
    assert_refused(file, f"`{next(iter(option))}` must be", **option)


def test_arguments_that_agree_with_the_file(file: Path) -> None:
    checkpoint.load(file, "resnet8", num_classes=6, image_shape=(3, 8, 9), mean=MEAN, std=STD)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda state: state,
        lambda state: {"state_dict": state, "epoch": 3},
        lambda state: {"model": state},
        lambda state: {f"module.{key}": value for key, value in state.items()},
        lambda state: {"state_dict": {f"module.{key}": value for key, value in state.items()}},
        lambda state: {
            "epoch": 3,
            "state_dict": {f"model._orig_mod.{key}": value for key, value in state.items()},
        },
    ],
    ids=["plain", "state_dict", "model", "module", "both", "lightning"],
)
@pytest.mark.parametrize("suffix", [".pt", ".pth"])
def test_state_dicts_of_torch(
    model: Normalized, tmp_path: Path, wrap: Callable[[dict[str, Tensor]], Any], suffix: str
) -> None:
    path = tmp_path / f"net{suffix}"
    torch.save(wrap(model.state_dict()), path)
    loaded = checkpoint.load(path, "resnet8", image_shape=(3, 8, 9))
    assert weights_digest(loaded) == weights_digest(model)
    assert loaded.config == model.config
    assert checkpoint.read_metadata(path) == {}


def bare(model: Normalized, tmp_path: Path) -> Path:
    """A state dict without mean and std."""
    path = tmp_path / "bare.pt"
    torch.save(
        {key: value for key, value in model.state_dict().items() if key not in ("mean", "std")},
        path,
    )
    return path


def test_state_dict_without_arch(model: Normalized, tmp_path: Path) -> None:
    assert_refused(bare(model, tmp_path), "`arch` must be given")


def test_normalisation_is_never_guessed(model: Normalized, tmp_path: Path) -> None:
    path = bare(model, tmp_path)
    assert_refused(path, "`mean` must be given", arch="resnet8")
    assert_refused(path, "`std` must be given", arch="resnet8", mean=MEAN)
    assert_refused(path, "`mean` must hold 3 numbers", arch="resnet8", mean=[0.5], std=STD)
    assert_refused(path, "`std` must lie in", arch="resnet8", mean=MEAN, std=[1, 0, 1])
    loaded = checkpoint.load(path, "resnet8", mean=MEAN, std=STD)
    assert torch.equal(loaded.mean, model.mean)
    assert torch.equal(loaded.std, model.std)
    assert loaded.config["image_shape"] == "3,32,32"


def test_state_dict_of_another_architecture(model: Normalized, tmp_path: Path) -> None:
    path = bare(model, tmp_path)
    assert_refused(path, "weights of resnet18", arch="resnet18", mean=MEAN, std=STD)
    assert_refused(path, "did you mean 'resnet8'", arch="resnet_8", mean=MEAN, std=STD)
    assert_refused(path, "fc.weight", arch="resnet8", num_classes=10, mean=MEAN, std=STD)


@pytest.mark.parametrize(
    "content",
    [
        [1, 2],
        {"state_dict": 3},
        {},
        {"epoch": 3, "w": torch.zeros(2)},
        {1: torch.zeros(2)},
    ],
)
def test_torch_files_of_anything_else(tmp_path: Path, content: object) -> None:
    path = tmp_path / "other.pt"
    torch.save(content, path)
    assert_refused(path, "weights only", arch="resnet8")


def test_state_dict_without_last_layer(tmp_path: Path) -> None:
    path = tmp_path / "headless.pt"
    torch.save(
        {"a": torch.zeros(2), "b": torch.zeros(2), "c": torch.zeros(2), "d": torch.zeros(2)}, path
    )
    assert_refused(path, "fc.weight", "a, b, c and 1 more", arch="resnet8")


@pytest.mark.parametrize("left", [0, 50, 5000])
def test_truncated_torch_file(model: Normalized, tmp_path: Path, left: int) -> None:
    path = bare(model, tmp_path)
    path.write_bytes(path.read_bytes()[:left])
    assert_refused(path, arch="resnet8", mean=MEAN, std=STD)


class Malicious:
    """A pickle that creates a folder when it is executed."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize(
    "write",
    [
        lambda content, path: torch.save(content, path),
        lambda content, path: torch.save({"state_dict": content}, path),
        lambda content, path: path.write_bytes(pickle.dumps(content, protocol=2)),
    ],
    ids=["torch", "wrapped", "pickle"],
)
def test_nothing_in_a_pickle_is_executed(
    tmp_path: Path, write: Callable[[object, Path], object]
) -> None:
    mark, path = tmp_path / "executed", tmp_path / "evil.pt"
    write(Malicious(mark), path)
    assert_refused(path, "weights only", arch="resnet8", mean=MEAN, std=STD)
    assert not mark.exists()
    # Executed on purpose, it does create the folder.
    pickle.loads(pickle.dumps(Malicious(mark)))
    assert mark.exists()


def _overflowing(weight: Tensor) -> Tensor:
    return weight.double() * 0 + 1e300


def _expanded(weight: Tensor) -> Tensor:
    return torch.zeros(1).expand(2**40, weight.shape[1])  # four bytes in the file


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (Tensor.to_sparse, "dense tensors with all their values"),
        (Tensor.to_sparse_csr, "dense tensors with all their values"),
        (lambda weight: weight.to("meta"), "dense tensors with all their values"),
        (
            lambda weight: torch.quantize_per_tensor(weight, 0.1, 0, torch.qint8),
            "dense tensors with all their values",
        ),
        (
            lambda weight: torch.nested.nested_tensor([weight[0], weight[1]]),
            "dense tensors with all their values",
        ),
        (Tensor.int, "another shape or type of fc.weight"),
        (Tensor.bool, "another shape or type of fc.weight"),
        (lambda weight: weight.to(torch.complex64), "another shape or type of fc.weight"),
        (
            _overflowing,
            "numbers in the range of fp32, in which they are used, got larger ones in fc.weight",
        ),
        (_expanded, "expanded ones: fc.weight"),
    ],
)
def test_unusual_tensors_are_refused(
    tmp_path: Path, change: Callable[[Tensor], Tensor], message: str
) -> None:
    state = zoo.build("cnn_small", num_classes=4, image_shape=(3, 8, 8)).state_dict()
    torch.save({**state, "fc.weight": change(state["fc.weight"])}, tmp_path / "a.pt")
    with pytest.raises(InputError, match=message):
        checkpoint.load(tmp_path / "a.pt", "cnn_small", image_shape=(3, 8, 8))


@pytest.mark.parametrize(
    ("metadata", "tensors", "message"),
    [
        ({"num_classes": "9" * 40}, {}, "num_classes like 10"),
        ({"num_classes": "-1"}, {}, "num_classes like 10"),
        ({"num_classes": "0"}, {}, "`num_classes` must be a whole number of at least 2"),
        ({"image_shape": "3,99999999999,9999999999"}, {}, "image_shape like 3,32,32"),
        ({"image_shape": "3,99999,99999"}, {}, "each at most"),
        ({"arch": "\x1b[31m"}, {}, "`arch` must be one of"),
        ({}, {"mean": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}}, "`.*` must"),
        (
            {},
            {"mean": {"dtype": "F32", "shape": [2**62, 4], "data_offsets": [0, 2]}},
            "whole safetensors file",
        ),
        (
            {},
            {"mean": {"dtype": "F32", "shape": [4], "data_offsets": [0, 2]}},
            "whole safetensors file",
        ),
        ({"arch": 3}, {}, "whole safetensors file"),
    ],
)
def test_absurd_headers_are_refused(
    tmp_path: Path, metadata: dict[str, Any], tensors: dict[str, Any], message: str
) -> None:
    known = {"arch": "cnn_small", "num_classes": "4", "image_shape": "3,8,8"}
    header = json.dumps({"__metadata__": {**known, **metadata}, **tensors}).encode()
    body = b"ab" if tensors else b""
    (tmp_path / "a.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + body)
    with pytest.raises(InputError, match=message):
        checkpoint.load(tmp_path / "a.safetensors")


def test_the_largest_numbers_are_described_or_refused() -> None:
    for arch in zoo.ARCHITECTURES.builtin:
        for shape in ((zoo.MAX_SIDE, 32, 32), (3, zoo.MAX_SIDE, zoo.MAX_SIDE)):
            try:
                model = zoo.build_empty(arch, num_classes=checks.MAX_CLASSES, image_shape=shape)
                assert model.config["num_classes"] == str(checks.MAX_CLASSES)
            except InputError as error:
                assert "a model that can be built" in str(error)


def test_the_bytes_are_those_of_the_library(tmp_path: Path) -> None:
    """Tensors of every type in the same order and at the same offsets; only the order of the
    metadata is fixed here."""
    values = torch.arange(6).view(2, 3)
    state = {
        f"{name}.{letter}": values.to(torch.float32).to(dtype)
        for dtype, name in checkpoint._DTYPES.items()
        for letter in "ba"
    }
    state |= {
        "scalar": torch.tensor(3.0),
        "empty": torch.zeros(0, 3),
        "transposed": torch.rand(3, 4).t(),
    }
    checkpoint.write_safetensors(tmp_path / "own", state, {"only": 'é\n\x01"'})
    library = save({key: value.contiguous() for key, value in state.items()}, {"only": 'é\n\x01"'})
    assert (tmp_path / "own").read_bytes() == library


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(2, 2).to_sparse(),
        torch.ones(2, device="meta"),
        torch.ones(2, dtype=torch.complex128),
    ],
    ids=["sparse", "meta", "complex128"],
)
def test_a_tensor_that_the_format_cannot_hold_is_refused(tmp_path: Path, value: Tensor) -> None:
    with pytest.raises(
        InputError, match=r"`weight` must be a dense tensor of a type that x\.safetensors can hold"
    ):
        checkpoint.write_safetensors(tmp_path / "x.safetensors", {"weight": value}, {})
    assert not list(tmp_path.iterdir())
