"""Settings of one model in its reference, `scheme:body?key=value&…`, and what a mixture folder
remembers of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn

from equipoise.core import progress
from equipoise.core.checks import InputError
from equipoise.mixing import MixedClassifier, load_model, save_mixture
from equipoise.models import (
    LoadOptions,
    ModelSettings,
    build,
    checkpoint,
    full_reference_of,
    info_of,
    load,
    note_loaded,
    parse,
    relocate,
    require_used,
    weights_digest,
)
from equipoise.models.options import escape, unescape

SHAPE = (1, 8, 8)
X = torch.rand(4, *SHAPE, generator=torch.Generator().manual_seed(3))
QUERY = "arch=cnn_small&mean=0.3&std=0.7&image_shape=1,8,8"
CODE = """
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(64, 6, bias=False)
        nn.init.eye_(self.fc.weight)
    def forward(self, x):
        return self.fc(x.flatten(1))
"""


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """A state dict of torch, with neither architecture nor mean and std."""
    model = build("cnn_small", num_classes=6, image_shape=SHAPE, seed=5)
    path = tmp_path / "net.pt"
    torch.save(
        {key: value for key, value in model.state_dict().items() if key not in ("mean", "std")},
        path,
    )
    return path


def test_settings_are_parsed_and_written() -> None:
    settings = ModelSettings.parse(
        "arch=resnet20&mean=0.49,1/4,0.45&num_classes=10&image_shape=3,32,32&seed=7", "r"
    )
    assert settings == ModelSettings(
        arch="resnet20", mean=(0.49, 0.25, 0.45), num_classes=10, image_shape=(3, 32, 32), seed=7
    )
    assert ModelSettings.parse(settings.query(), "r") == settings


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("arhc=resnet20", "did you mean 'arch'"),
        ("allow_code=1", "must be one of"),
        ("arch", "must have one value"),
        ("arch=", "`arch` must have one value"),
        ("arch=a&arch=b", "`arch` must have one value"),
        ("mean=a,b", "`mean` must be a number"),
        ("num_classes=ten", "`num_classes` must be a whole number"),
        ("num_classes=-1", "`num_classes` must be a whole number"),
        ("image_shape=3,32", "`image_shape` must be C,H,W"),
        ("image_shape=3,32,0", "`image_shape` must be"),
        ("", "must be one of"),
        ("&".join(["arch=a"] * 200), "at most 100"),
    ],
)
def test_mistakes_in_settings_are_one_sentence(query: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        parse(f"file:x.pt?{query}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text", ["a?b", "%3F", "%253F", "a%20b?", "100%", "%26&", "??%3F3F", "%25", "%2525263F"]
)
@pytest.mark.parametrize("separators", ["?", "?&"])
def test_any_text_can_be_written(text: str, separators: str) -> None:
    written = escape(text, separators)
    assert unescape(written) == text and not set(separators) & set(written)


@given(
    st.sampled_from(
        ["file:", "exported:", "python:", "tta:2:file:", "smoothed:0.5,3:exported:", "hf:./"]
    ),
    st.text("ab.:/%35F2?&=é~ ", min_size=1, max_size=30),
    st.text("ab/%263F?&=,", min_size=1, max_size=20),
)
def test_what_is_written_is_read(scheme: str, body: str, labels: str) -> None:
    """A reference keeps its meaning when it is written with all its settings, and when its paths do
    not change."""
    assume(not body.startswith("~/"))  # the user's folder
    text = f"{scheme}{escape(body)}?labels={escape(labels, '?&')}&mean=0.25"
    reference = parse(text)
    inside = (
        body if reference.scheme not in ("tta", "smoothed") else f"{scheme.partition(':')[2]}{body}"
    )
    assert reference.body.endswith(inside) and reference.settings.labels == labels
    for again in (parse(str(reference)), parse(relocate(text, lambda path: path))):
        assert (again.scheme, again.body, again.settings) == (
            reference.scheme,
            reference.body,
            reference.settings,
        )


def test_a_literal_question_mark(tmp_path: Path, weights: Path) -> None:
    odd = tmp_path / "why?.pt"
    odd.write_bytes(weights.read_bytes())
    written = str(odd).replace("?", "%3F")
    assert parse(f"file:{written}").body == str(odd) and parse(str(odd)).body == str(odd)
    assert weights_digest(load(f"{written}?{QUERY}")) == weights_digest(load(f"{weights}?{QUERY}"))
    assert parse(relocate(str(odd), lambda path: path)).body == str(odd)


def test_long_settings_of_a_bare_path(weights: Path) -> None:
    """Longer than the name of any file."""
    many = ",".join(map(str, range(6)))
    assert load_model(f"{weights}?{QUERY}&labels={many}&preset=Res8x8")(X).shape == (4, 6)
    with pytest.raises(InputError, match="`labels` must be classes of"):
        load_model(f"{weights}?{QUERY}&labels={','.join(map(str, range(2000)))}")
    for text in ("x" * 5000, f"{'x' * 300}.pt", "a?" * 400):
        with pytest.raises(InputError):
            load_model(text)


def test_settings_belong_to_the_innermost_reference(weights: Path) -> None:
    text = f"smoothed:0.25,8:tta:2:{weights}?{QUERY}"
    model = load(text)
    inner = load(f"{weights}?{QUERY}")
    assert weights_digest(model.get_submodule("model.model")) == weights_digest(inner)
    moved = relocate(text, lambda path: f"/elsewhere/{Path(path).name}")
    assert moved == f"smoothed:0.25,8:tta:2:file:/elsewhere/net.pt?{QUERY}"


def test_settings_of_the_reference_and_of_the_call(weights: Path) -> None:
    expected = load(str(weights), arch="cnn_small", mean=[0.3], std=[0.7], image_shape=SHAPE)
    assert torch.equal(load(f"{weights}?{QUERY}")(X), expected(X))
    with pytest.raises(InputError, match="`arch` must be 'cnn_small', as in"):
        load(f"{weights}?{QUERY}", arch="cnn")
    defaults = LoadOptions(arch="cnn", mean=(0.9,), std=(0.9,))
    assert torch.equal(load(f"{weights}?{QUERY}", defaults)(X), expected(X)), (
        "its own settings come first"
    )
    with pytest.raises(InputError, match="`seed` must be left out"):
        load(f"{weights}?{QUERY}&seed=3")


def test_options_for_all_models_are_for_those_that_need_them(
    weights: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "own_net.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    options = LoadOptions(arch="cnn_small", mean=(0.3,), std=(0.7,), image_shape=SHAPE)
    models = [load("python:own_net.py:Net", options), load(str(weights), options)]
    assert torch.equal(models[1](X), load(f"{weights}?{QUERY}")(X))
    require_used(options, models)
    with pytest.raises(InputError, match="`arch` must be left out, because no model"):
        require_used(options, models[:1])


def test_a_mixture_remembers_the_settings_of_its_bases(
    weights: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "own_net.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    options = LoadOptions(
        arch="cnn_small", mean=(0.3,), std=(0.7,), image_shape=SHAPE, num_classes=6
    )
    accurate, robust = (
        load(f"tta:2:{weights}", options),
        load("python:code/own_net.py:Net", options),
    )
    assert full_reference_of(accurate) == (
        f"tta:2:{weights}?arch=cnn_small&mean=0.3&std=0.7&num_classes=6&image_shape=1,8,8"
    )
    save_mixture(tmp_path / "m", MixedClassifier(accurate, robust, 0.6))
    monkeypatch.chdir("/")  # nothing depends on the current folder
    with pytest.raises(InputError, match="allow_code"):
        load_model(tmp_path / "m")
    mixture = load_model(tmp_path / "m", allow_code=True)
    assert torch.equal(mixture(X), MixedClassifier(accurate, robust, 0.6)(X))
    text = (tmp_path / "m" / "mixture.toml").read_text()
    assert "tta:2:file:../net.pt?arch=cnn_small" in text and "python:../code/own_net.py:Net" in text


def test_classes_and_size_of_the_network_are_not_those_of_the_data(
    weights: Path, tmp_path: Path
) -> None:
    """The network has six classes and takes 8×8 pixels; the data have two and 16×12."""
    x = torch.rand(3, 1, 16, 12, generator=torch.Generator().manual_seed(6))
    size = torch.nn.functional.interpolate(x, size=(8, 8), mode="bilinear", antialias=True)
    plain = load(f"{weights}?{QUERY}")
    checkpoint.save(tmp_path / "net.safetensors", plain)
    for text in (f"{weights}?{QUERY}&", f"{tmp_path}/net.safetensors?"):
        model = load(f"{text}labels=5,2&preset=Res8x8", num_classes=2, image_shape=(1, 16, 12))
        torch.testing.assert_close(model(x), plain(size)[:, [5, 2]])
        again = full_reference_of(model)
        assert again is not None and torch.equal(load(again)(x), model(x))


def test_what_was_loaded_in_one_line(weights: Path) -> None:
    for text in (f"{weights}?{QUERY}", f"tta:2:{weights}?{QUERY}"):
        info = info_of(load(text))
        assert (
            info is not None
            and info.num_classes == 6
            and info.input_shape == SHAPE
            and not info.of_zoo
        )
        assert str(info) == (
            "cnn_small; 6 classes; input 1×8×8; normalisation: mean 0.3, std 0.7 (from the "
            f"reference); weights: {weights}"
        )
    assert info_of(nn.Identity()) is None


def test_a_file_that_names_its_architecture_is_of_this_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No line for it; a line, and the probe, for a file whose architecture and normalisation the
    user gives."""
    model = build("cnn_small", num_classes=6, image_shape=SHAPE, seed=2)
    checkpoint.save(tmp_path / "net.safetensors", model)
    torch.save(
        {key: value for key, value in model.state_dict().items() if key not in ("mean", "std")},
        tmp_path / "net.pt",
    )
    lines: list[str] = []
    monkeypatch.setattr(progress, "note", lines.append)
    note_loaded(
        {
            "own": load(f"{tmp_path}/net.safetensors"),
            "zoo": model,
            "other": load(f"{tmp_path}/net.pt?arch=cnn_small&image_shape=1,8,8&mean=0&std=1"),
        }
    )
    assert len(lines) == 1 and "mean 0, std 1 (from the reference)" in lines[0]
