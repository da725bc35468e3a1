from __future__ import annotations

from pathlib import Path

import pytest
import torch

from equipoise.core.checks import InputError
from equipoise.models import identity
from equipoise.models.layers.labels import SUBSETS, SelectClasses, parse_labels

NAMES = ("cat", "dog", "horse, wild", "12")


def test_subsets_of_imagenet_are_ten_of_its_classes_in_order() -> None:
    for classes in SUBSETS.values():
        assert (
            len(set(classes)) == 10
            and list(classes) == sorted(classes)
            and classes[0] >= 0
            and classes[-1] < 1000
        )
    assert SUBSETS["imagenette"][:3] == (0, 217, 482)  # tench, English springer, cassette player


@pytest.mark.parametrize(
    ("lines", "expected"),
    [("dog\ncat\n", (1, 0)), ("horse, wild\n0\n", (2, 0)), ("3\n\n1\n 2 \n", (3, 1, 2))],
)
def test_labels_from_a_file(tmp_path: Path, lines: str, expected: tuple[int, ...]) -> None:
    (tmp_path / "names.txt").write_text(lines)
    assert parse_labels(f"{tmp_path}/names.txt", NAMES) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("imagenete", "did you mean 'imagenette'"),
        ("1", "at least two different"),
        ("1,1", "at least two different"),
        ("1,-2", "numbers of classes"),
        ("1,dog", "numbers of classes"),
        ("1,9999999", "numbers of classes"),
        ("./none.txt", "text file with one class per line"),
        ("1,500000", "`labels` must be at most"),
        (",", "numbers of"),
    ],
)
def test_mistakes_are_one_sentence(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_labels(text)


@pytest.mark.parametrize("names", [NAMES, ()])
def test_the_lines_of_another_file_are_not_shown(tmp_path: Path, names: tuple[str, ...]) -> None:
    """A folder from elsewhere may name any file of the user."""
    (tmp_path / "names.txt").write_text("1\n\npassword horse, wil\n")
    with pytest.raises(
        InputError, match=r"got another line 2 \(without empty ones\) in '.*names.txt'"
    ) as caught:
        parse_labels(f"{tmp_path}/names.txt", names)
    assert "password" not in str(caught.value) and caught.value.__cause__ is None


def test_subsets_of_imagenet_are_for_its_classes_alone() -> None:
    assert parse_labels("imagenette", num_classes=1000) == SUBSETS["imagenette"]
    for count in (10, 1001, 21841):
        with pytest.raises(
            InputError, match=f"1000 classes of ImageNet, got .*for {count} classes"
        ):
            parse_labels("imagenette", num_classes=count)


def test_classes_are_settings_and_not_weights() -> None:
    layer = SelectClasses((2, 0))
    logits = torch.tensor([[1.0, 2.0, 3.0]])
    assert layer(logits).tolist() == [[3.0, 1.0]] and not layer.state_dict()
    assert identity(layer) != identity(SelectClasses((0, 2)))
    with pytest.raises(InputError, match=r"lie in 0\.\.1, got 2"):
        layer(logits[:, :2])
