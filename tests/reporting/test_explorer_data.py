"""What the explorer of a report carries: the columns are the rows of the run, and small."""

from __future__ import annotations

import base64
import io
import json
import zlib
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import explored_run
import numpy as np
import pytest
import synthetic_run
from hypothesis import given
from hypothesis import strategies as st
from parsed_report import ParsedReport

from equipoise.core import aggregation, arrays
from equipoise.core.arrays import AttackedArrays, FrontierArrays, PictureArrays
from equipoise.core.results import Summary
from equipoise.core.rows import AttackRow
from equipoise.reporting import report
from equipoise.reporting.explorer import columns
from equipoise.reporting.explorer.data import NO_MARGIN, explorer
from equipoise.reporting.explorer.pictures import MIDDLE, sprites
from equipoise.reporting.section import RunView, read_run

NUMPY = {"Uint8Array": "<u1", "Uint16Array": "<u2", "Uint32Array": "<u4", "Int16Array": "<i2"}


def unpack(text: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    content = zlib.decompress(base64.b64decode(text))
    size = int.from_bytes(content[:4], "little")
    header = json.loads(content[4 : 4 + size])
    places = header.pop("columns")
    return header, {
        name: np.frombuffer(
            content, NUMPY[place["type"]], place["length"], 4 + size + place["offset"]
        )
        for name, place in places.items()
    }


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunView:
    return explored_run.make(tmp_path_factory.mktemp("explored") / "run")


@pytest.fixture(scope="module")
def unpacked(run: RunView) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    section = explorer(run)
    assert section is not None and section.explorer is not None
    return unpack(section.explorer.columns)


def test_columns_are_the_rows_of_the_run(
    run: RunView, unpacked: tuple[dict[str, Any], dict[str, np.ndarray]]
) -> None:
    header, own = unpacked
    rows = {
        (row.model, row.attack, row.index): row for row in run.rows if isinstance(row, AttackRow)
    }
    assert header["count"] == 200 and [model["symbol"] for model in header["models"]] == [
        "g",
        "h",
        "mixture",
    ]
    for m, model in enumerate(explored_run.NAMES):
        for i, index in enumerate(own["index"].tolist()):
            clean, attacked = rows[model, "clean", index], rows[model, "fast", index]
            assert (own["label"][i], own[f"clean{m}"][i], own[f"attacked{m}"][i]) == (
                clean.label,
                clean.predicted,
                attacked.predicted,
            )
            code = int(own[f"broken{m}"][i])
            expected = (
                "stands"
                if attacked.correct
                else f"fast: {attacked.broken_by}"
                if clean.correct
                else "clean"
            )
            assert ["stands", "clean", *header["attacks"]][code] == expected
            assert (own[f"margin{m}"][i] > 0) == attacked.correct
        shares = header["models"][m]["results"]
        assert shares["clean"]["value"] == np.mean(own[f"clean{m}"] == own["label"])
        assert shares["attacked"]["value"] == np.mean(own[f"broken{m}"] == 0)


def test_steps_of_the_slider_are_the_stored_mixtures(
    run: RunView, unpacked: tuple[dict[str, Any], dict[str, np.ndarray]]
) -> None:
    header, own = unpacked
    frontier = FrontierArrays.load(run.folder)
    assert frontier is not None
    predicted = np.bitwise_xor.accumulate(own["stepPredicted"].reshape(-1, 200), axis=0)
    bits = np.bitwise_xor.accumulate(own["stepBits"].reshape(-1, 200), axis=0)
    assert (predicted == frontier.predicted).all()
    assert ((bits & 1) == frontier.by_accurate).all() and ((bits >> 1) == frontier.standing).all()
    for step, right, stands in zip(
        header["steps"], predicted == own["label"], frontier.standing, strict=True
    ):
        assert step["clean"]["value"] == right.mean() and step["attacked"]["value"] == stands.mean()
        assert step["clean"]["low"] <= step["clean"]["value"] <= step["clean"]["high"]
    assert [step["lost"] for step in header["steps"]][:7] == list(explored_run.LOSSES)
    assert sum(step["evaluated"] for step in header["steps"]) == 1


def test_the_mixture_of_the_slider_is_the_evaluated_one(
    run: RunView, unpacked: tuple[dict[str, Any], dict[str, np.ndarray]]
) -> None:
    """Its clean answers are the measured ones; the estimate under attack is below the measurement,
    image by image."""
    header, own = unpacked
    (step,) = (number for number, step in enumerate(header["steps"]) if step["evaluated"])
    predicted = np.bitwise_xor.accumulate(own["stepPredicted"].reshape(-1, 200), axis=0)[step]
    standing = np.bitwise_xor.accumulate(own["stepBits"].reshape(-1, 200), axis=0)[step] >> 1
    assert (predicted == own["clean2"]).all() and (standing <= (own["broken2"] == 0)).all()
    mixture = header["models"][2]["results"]
    assert header["steps"][step]["clean"]["value"] == mixture["clean"]["value"]
    assert header["steps"][step]["attacked"]["value"] < mixture["attacked"]["value"]


def shown(
    folder: Path, rows: list[AttackRow], **more: Any
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The explorer of an evaluation with these rows."""
    section = explorer(
        synthetic_run.write_run(
            folder,
            Summary(
                command="evaluate", seconds=1.0, results=tuple(aggregation.accuracies(rows, None))
            ),
            rows,
            **more,
        )
    )
    assert section is not None and section.explorer is not None
    return unpack(section.explorer.columns)


def test_all_attacks_that_broke_an_image_are_known(tmp_path: Path) -> None:
    """As many images for each attack and stage as the static table counts, though one attack is the
    worst."""
    rng = np.random.default_rng(0)
    rows = [
        AttackRow(
            index=i,
            model="m",
            attack=attack,
            label=0,
            predicted=int(margin <= 0),
            correct=margin > 0,
            margin=margin,
            broken_by=None if attack == "clean" or margin > 0 else f"stage-{rng.integers(4)}",
        )
        for i in range(80)
        for attack in ("clean", "a", "b", "c")
        for margin in [float(rng.normal(2.0 if attack == "clean" else 0.0))]
    ]
    header, own = shown(tmp_path / "run", rows)
    words = own["brokenBy0"].reshape(-1, 80)
    assert len(header["attacks"]) == 12 and len(words) == 2
    counts = {
        name: int((words[a // 8] >> a % 8 & 1).sum()) for a, name in enumerate(header["attacks"])
    }
    assert counts == {
        f"{item.attack}: {item.stage}": item.count for item in aggregation.broken_by(rows)
    }
    worst = own["broken0"]
    assert all(
        words[(code - 2) // 8][i] >> (code - 2) % 8 & 1
        for i, code in enumerate(worst.tolist())
        if code > 1
    )
    assert sum(counts.values()) > (worst > 1).sum()


def test_shares_of_a_randomised_model_add_up_to_its_results(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    rows = [
        AttackRow(
            index=i,
            model="m",
            attack=attack,
            label=i % 3,
            predicted=i % 3 if share > 0.5 else 3,
            correct=share > 0.5,
            margin=round(float(rng.uniform(-1, 1)), 6),
            share_correct=share,
            passes=10,
        )
        for i in range(60)
        for attack in ("clean", "a", "b")
        for share in [float(rng.integers(11)) / 10]
    ]
    header, own = shown(tmp_path / "run", rows)
    results = header["models"][0]["results"]
    for column, key in (("shareClean0", "clean"), ("shareAttacked0", "attacked")):
        assert (own[column] / 65535).mean() == pytest.approx(results[key]["value"], abs=1e-5)
    assert header["models"][0]["passes"] == 10
    section = explorer(read_run(tmp_path / "run"))
    assert section is not None and "those of most of 10 passes" in section.prose[1]


def test_a_run_in_progress_shows_results_of_the_images_that_it_shows(tmp_path: Path) -> None:
    """Of 100 clean images, 90 of them right, a suite has decided two, which it broke."""
    rows = [
        *(
            AttackRow(
                index=i, model="m", attack="clean", label=0, predicted=int(i >= 90), correct=i < 90
            )
            for i in range(100)
        ),
        *(
            AttackRow(
                index=i,
                model="m",
                attack="fast",
                label=0,
                predicted=1,
                correct=False,
                broken_by="apgd",
            )
            for i in range(2)
        ),
    ]
    run = synthetic_run.write_run(
        tmp_path / "run",
        Summary(command="evaluate", seconds=1.0, results=()),
        rows,
        {"command": "evaluate", "data": {"name": "d", "count": 120}},
    )
    (run.folder / "summary.json").unlink()
    section = explorer(read_run(run.folder))
    assert section is not None and section.explorer is not None
    header, own = unpack(section.explorer.columns)
    assert section.prose[0].startswith(
        "2 of 120 images so far: those measured under every attack. A suite of attacks"
    )
    assert header["count"] == 2 and own["index"].tolist() == [0, 1]
    assert [header["models"][0]["results"][key]["value"] for key in ("clean", "attacked")] == [
        1.0,
        0.0,
    ]


@given(
    st.lists(st.floats(-1, 1).map(lambda value: round(value, 6)), min_size=1),
    st.integers(-10_000, 10_000),
)
def test_no_threshold_with_four_digits_sees_the_quantisation(
    values: list[float], threshold: int
) -> None:
    exact = [round(value * 1_000_000) > threshold * 100 for value in values]
    assert (columns.margins(np.array(values)) > threshold).tolist() == exact


def test_a_row_without_a_margin_has_none(tmp_path: Path) -> None:
    rows = [
        AttackRow(index=i, model="m", attack=attack, label=0, predicted=0, correct=True)
        for i in range(3)
        for attack in ("clean", "pgd")
    ]
    section = explorer(
        synthetic_run.write_run(
            tmp_path / "run", Summary(command="evaluate", seconds=1.0, results=()), rows
        )
    )
    assert section is not None and section.explorer is not None
    assert unpack(section.explorer.columns)[1]["margin0"].tolist() == [NO_MARGIN] * 3


def test_images_that_a_model_was_not_measured_on_are_left_out(tmp_path: Path) -> None:
    rows = [
        AttackRow(index=i, model="m", attack=attack, label=0, predicted=0, correct=True, margin=0.5)
        for attack, count in (("clean", 5), ("pgd", 4), ("apgd", 3))
        for i in range(count)
    ]
    section = explorer(
        synthetic_run.write_run(
            tmp_path / "run", Summary(command="evaluate", seconds=1.0, results=()), rows
        )
    )
    assert section is not None and section.explorer is not None
    assert unpack(section.explorer.columns)[1]["index"].tolist() == [0, 1, 2]


def test_a_frontier_of_other_images_is_not_shown(tmp_path: Path) -> None:
    run = explored_run.make(tmp_path / "run", n=50, pictures=5)
    known = FrontierArrays.load(run.folder)
    assert known is not None
    arrays.save(run.folder, replace(known, index=known.index + 1))
    section = explorer(run)
    assert section is not None and section.explorer is not None
    assert "steps" not in unpack(section.explorer.columns)[0]


def test_a_certificate_or_a_fit_has_no_explorer(tmp_path: Path) -> None:
    run = explored_run.make(tmp_path / "run", n=20, pictures=5)
    for command in ("fit", "certify", "train"):
        other = RunView(
            run.folder,
            run.identity,
            run.settings,
            Summary(command=command, seconds=1.0, results=()),
            run.rows,
        )
        assert explorer(other) is None


def test_sprites_give_back_every_byte() -> None:
    from PIL import Image

    rng = np.random.default_rng(0)
    pictures = explored_run._pictures(rng, np.arange(30) % 10, 7, 5)
    clean, attacked = (
        rng.integers(0, 256, pictures.clean.shape).astype(np.uint8) for _ in range(2)
    )
    clean[0, 0, 0, :2], attacked[0, 0, 0, :2] = (0, 255), (255, 0)  # what a sparse attack may do
    pictures = replace(pictures, clean=clean, attacked=attacked)
    written = sprites(pictures)
    sheets = [
        np.asarray(Image.open(io.BytesIO(base64.b64decode(str(written[name]).split(",")[1]))))
        for name in ("clean", "change")
    ]
    per_row = int(written["perRow"])
    for p in range(7):
        y, x = 5 * (p // per_row), 5 * (p % per_row)
        clean, change = (
            sheet[y : y + 5, x : x + 5].astype(int).transpose(2, 0, 1) for sheet in sheets
        )
        assert (clean == pictures.clean[p]).all()
        assert ((clean + change - MIDDLE) % 256 == pictures.attacked[p]).all()


REST = 60_000  # bytes of the text and the static tables of a report, which do not depend on the number of images


def test_ten_thousand_images_take_less_than_600_kilobytes(tmp_path: Path) -> None:
    """Columns with a frontier of 48 mixtures, script and style; nothing is written."""
    run, _, frontier = explored_run.in_memory(tmp_path, 10_000, pictures=5)
    arrays.save(tmp_path, frontier)
    section = explorer(run)
    assert section is not None and section.explorer is not None
    _, own = unpack(section.explorer.columns)
    assert sum(values.size == 10_000 for values in own.values()) >= 12
    assets = resources.files("equipoise.reporting.explorer")
    sizes = [
        len(asset.read_bytes())
        for asset in assets.iterdir()
        if asset.name.endswith((".js", ".css"))
    ]
    assert len(sizes) > 2
    assert len(section.explorer.columns) + sum(sizes) < 600_000 - REST


@pytest.mark.slow
def test_a_whole_report_of_ten_thousand_images_is_small(tmp_path: Path) -> None:
    page = report(explored_run.make(tmp_path / "run", n=10_000, pictures=5).folder)
    parsed = ParsedReport(page)
    pictures = sum(len(value) for name, value in parsed.attributes if name in ("src", "srcset"))
    pictures += len(parsed.data_blocks["explorer-pictures"])
    print(f"{page.stat().st_size} bytes, {pictures} of them pictures")
    assert page.stat().st_size - pictures < 600_000


def test_a_class_name_is_data_in_the_report(run: RunView, tmp_path: Path) -> None:
    """It stands in the columns as it is, and as text in the table of classes."""
    rows = [
        replace(row, broken_as_bytes=True)
        for row in run.rows
        if isinstance(row, AttackRow) and not row.correct
    ]
    view = synthetic_run.write_run(
        tmp_path / "run",
        replace(run.summary, as_bytes=tuple(aggregation.as_bytes(rows, None))),
        run.rows,
    )
    image = np.zeros((1, 3, 4, 4), dtype=np.float16)
    arrays.save(
        view.folder,
        PictureArrays.load(run.folder),
        AttackedArrays(
            clean=image,
            attacked=image,
            index=np.array([0]),
            label=np.array([9]),
            predicted=np.array([8]),
            model="mixed",
            attack="fast",
            class_names=explored_run.CLASSES,
        ),
    )
    page = ParsedReport(report(view.folder))
    assert (
        unpack(page.data_blocks["explorer-columns"])[0]["classes"][-1] == explored_run.CLASSES[-1]
    )
    assert any(
        row[0].startswith(explored_run.CLASSES[-1]) for table in page.tables for row in table
    )
    assert (
        "&lt;script&gt;alert(1)&lt;/script&gt;" in page.source
        and "<script>alert(1)</script>" not in page.source
    )


def evaluated(models: dict[str, float], n: int = 40, classes: int = 3) -> list[AttackRow]:
    """Rows of models with these shares of correct clean images, half of them under attack."""
    return [
        AttackRow(
            index=i,
            model=model,
            attack=attack,
            label=i % classes,
            correct=correct,
            margin=0.5 if correct else -0.5,
            predicted=(i + (not correct)) % classes,
        )
        for model, share in models.items()
        for attack in ("clean", "pgd")
        for i in range(n)
        for correct in [i < share * n * (1 if attack == "clean" else 0.5)]
    ]


def test_no_model_is_left_out(tmp_path: Path) -> None:
    """More models than the table has columns: all have their figures, and g, h and the mixture have
    the columns."""
    shares = {
        "file:other.safetensors": 0.5,
        "mixture:a mixed": 0.9,
        "mixture:a accurate": 1.0,
        "mixture:a robust": 0.8,
    }
    header, own = shown(tmp_path / "run", evaluated(shares))
    values = {model["symbol"]: model["results"]["clean"]["value"] for model in header["models"]}
    assert values == {"g": 1.0, "h": 0.8, "mixture": 0.9, "file:other": 0.5}
    roles = header["roles"]
    assert sorted(roles.values()) == header["inTable"] and set(roles) == {"g", "h", "mixture"}
    for model in range(4):
        assert (
            np.mean(own[f"clean{model}"] == own["label"])
            == header["models"][model]["results"]["clean"]["value"]
        )


def test_two_mixtures_have_no_roles(tmp_path: Path) -> None:
    header, _ = shown(
        tmp_path / "run", evaluated({f"mixture:{name} mixed": 0.5 for name in "abcd"})
    )
    assert header["roles"] == {} and len(header["models"]) == 4 and header["inTable"] == [0, 1, 2]
