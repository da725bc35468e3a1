from __future__ import annotations

from pathlib import Path

import pytest
import torch

from equipoise import mixing, models
from equipoise.core.checks import InputError
from equipoise.mixing import MixedClassifier
from equipoise.models import checkpoint


def _saved(folder: Path, alpha: float = 0.3) -> MixedClassifier:
    folder.mkdir()
    bases = [models.build("cnn", num_classes=6, image_shape=(3, 8, 8), seed=seed) for seed in (1, 2)]
    for name, base in zip(("accurate", "robust"), bases, strict=True):
        checkpoint.save(folder / f"{name}.safetensors", base, {})
    mixture = MixedClassifier(bases[0], bases[1], alpha).eval()
    mixing.save(folder, mixture, accurate=f"file:{folder}/accurate.safetensors",
                robust=str(folder / "robust.safetensors"))
    return mixture


def test_round_trip_also_after_a_move(tmp_path: Path) -> None:
    mixture = _saved(tmp_path / "m")
    (tmp_path / "m").rename(tmp_path / "moved")
    x = torch.rand(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    for reference in (f"mixture:{tmp_path}/moved", f"{tmp_path}/moved"):
        loaded = mixing.load(reference)
        assert isinstance(loaded, MixedClassifier) and loaded.alpha == 0.3
        assert torch.equal(loaded(x), mixture(x))


def test_a_base_that_changed_is_refused(tmp_path: Path) -> None:
    _saved(tmp_path / "m")
    other = models.build("cnn", num_classes=6, image_shape=(3, 8, 8), seed=9)
    checkpoint.save(tmp_path / "m" / "robust.safetensors", other, {})
    with pytest.raises(InputError, match=r"the robust base .* weights have changed"):
        mixing.load(f"mixture:{tmp_path}/m")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [("alpha = ", "alfa = ", "did you mean 'alpha'"), ("alpha = 0.3", 'alpha = "x"', "`alpha` must be a number"),
     ("alpha = 0.3", "alpha = 1.75", r"`alpha` must lie in \[0, 1\]"),
     ("schema = 1", "schema = 9", "`schema` must be 1")],
)
def test_a_spoiled_folder(tmp_path: Path, old: str, new: str, message: str) -> None:
    _saved(tmp_path / "m")
    told = tmp_path / "m" / "mixture.toml"
    assert old in told.read_text()
    told.write_text(told.read_text().replace(old, new))
    with pytest.raises(InputError, match=message):
        mixing.load(f"mixture:{tmp_path}/m")


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"`mixture` must be a folder that holds mixture\.toml"):
        mixing.load(f"mixture:{tmp_path}/none")


def test_a_base_that_looks_twice_moves_with_its_folder(tmp_path: Path) -> None:
    plain = _saved(tmp_path / "m")
    mixture = MixedClassifier(plain.accurate, models.TTAClassifier(plain.robust, 2), 0.3).eval()
    mixing.save(tmp_path / "m", mixture, accurate=f"file:{tmp_path}/m/accurate.safetensors",
                robust=f"looks:2:{tmp_path}/m/robust.safetensors")
    (tmp_path / "m").rename(tmp_path / "moved")
    x = torch.rand(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    found = mixing.load(f"mixture:{tmp_path}/moved")(x)
    assert torch.equal(found, mixture(x)) and not torch.allclose(found, plain(x))
