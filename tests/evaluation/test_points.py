"""Attacked points that an evaluation stores for its report, and what other mixtures would predict
there."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from killed_runs import run_until_killed
from mixture_pairs import SWITCH, labelled_by, random_pair
from small_models import CONDITIONS, SmallNet, linear_model, random_images

from equipoise.attacks import Apgd, Square, Suite
from equipoise.core import aggregation
from equipoise.core.arrays import AttackedArrays, FrontierArrays, PictureArrays
from equipoise.core.rows import AttackRow
from equipoise.core.threat import Threat
from equipoise.data import pixels
from equipoise.evaluation import Evaluation, Job, evaluate
from equipoise.evaluation.plan import EvaluationPlan
from equipoise.evaluation.points import MAX_PIXELS, MIN_PICTURES, PointRecorder, sampled
from equipoise.mixing import FrontierMixture, MixedClassifier
from simulated_processes import run_processes

EPS, COUNT = 0.01, 24
SUITE = Suite((Apgd(steps=4), Square(queries=8)), name="short")
FRONTIER = tuple(
    FrontierMixture(lost, 0.5, 1 / (1 + q), "linear", 3.0, 1.0, 0.0, 0.0, 1.0)
    for lost, q in ((0.01, 0.1), (0.03, 0.4), (0.08, 0.8))
)


def mixture() -> MixedClassifier:
    g, h = random_pair(1)
    return MixedClassifier(g, h, 1 / 1.4, logit_map=SWITCH, hard=True, frontier=FRONTIER).eval()


def run(out: Path | None, attack: Any = SUITE, count: int = COUNT, **settings: Any) -> Evaluation:
    mixed = mixture()
    return evaluate(
        mixed,
        labelled_by(mixed, count),
        threat=Threat("linf", EPS),
        attack=attack,
        out=out,
        device="cpu",
        batch_size=16,
        **settings,
    )


def quick(out: Path) -> Evaluation:
    return run(out, count=12, adaptive="none")


@pytest.fixture(scope="module", params=["suite", "pgd"])
def evaluated(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Evaluation:
    out = tmp_path_factory.mktemp("points") / "run"
    return run(out) if request.param == "suite" else run(out, "pgd", steps=4)


def frontier_of(folder: Path | None) -> FrontierArrays:
    assert folder is not None
    frontier = FrontierArrays.load(folder)
    assert frontier is not None
    return frontier


def test_every_step_predicts_what_its_mixture_predicts(evaluated: Evaluation) -> None:
    frontier, mixed = frontier_of(evaluated.out), mixture()
    data = labelled_by(mixed, COUNT)
    assert frontier.lost[:3].tolist() == [0.01, 0.03, 0.08] and np.isnan(frontier.lost[3:]).all()
    for step, alpha in enumerate(frontier.alpha.tolist()):
        logit_map = FRONTIER[step].logit_map() if step < 3 else SWITCH
        model = MixedClassifier(
            mixed.accurate, mixed.robust, alpha, logit_map=logit_map, hard=True
        ).eval()
        with torch.no_grad():
            assert (
                model(pixels(data.images)).argmax(dim=1).tolist()
                == frontier.predicted[step].tolist()
            )
    own = int(np.flatnonzero(frontier.alpha[3:] == frontier.evaluated)[0]) + 3
    rows = {
        row.index: row.predicted
        for row in evaluated.rows
        if isinstance(row, AttackRow) and (row.model, row.attack) == ("mixed", "clean")
    }
    assert [rows[i] for i in frontier.index.tolist()] == frontier.predicted[own].tolist()


def test_the_estimate_is_never_above_what_was_measured(evaluated: Evaluation) -> None:
    """Where an attack broke the mixture, or its robust model alone, its point is stored: the image
    does not stand."""
    frontier, correct = frontier_of(evaluated.out), aggregation.correct_by_attack(evaluated.rows)
    for name, alpha in (("mixed", frontier.evaluated), ("robust", 1.0)):
        step = int(np.flatnonzero(frontier.alpha[3:] == alpha)[0]) + 3
        worst = correct[name, None]["worst"]
        measured = np.array([worst[i] for i in frontier.index.tolist()])
        assert not (frontier.standing[step] & ~measured).any()
        assert 0 < frontier.standing[step].sum() <= measured.sum() < len(measured)


def test_more_weight_of_g_never_makes_an_image_stand(evaluated: Evaluation) -> None:
    frontier = frontier_of(evaluated.out)
    order = np.argsort(frontier.alpha[3:])
    decided = frontier.by_accurate[3:][order]
    assert (decided[:-1] >= decided[1:]).all()  # g decides less with more weight of h
    assert not frontier.standing[3:][order][0].any()  # alpha 0: g decides everything
    margins, stands = frontier.margins[1], frontier.standing[3:][order]
    q = 1 / frontier.alpha[3:][order][1:] - 1
    data = labelled_by(mixture(), COUNT)
    clean = frontier.predicted[3:][order][1:] == data.labels.numpy()
    assert (
        stands[1:]
        <= ((margins > q[:, None] - 1e-6) | (frontier.gaps[1] <= q[:, None] + 1e-5)) & clean
    ).all()


def test_pictures_are_failures_and_a_sample(evaluated: Evaluation) -> None:
    assert evaluated.out is not None
    pictures, mixed = PictureArrays.load(evaluated.out), mixture()
    assert (
        pictures is not None
        and pictures.models == ("accurate", "robust", "mixed")
        and pictures.model == "mixed"
    )
    data = labelled_by(mixed, COUNT)
    assert (pictures.clean == data.images[torch.from_numpy(pictures.index)].numpy()).all()
    change = pictures.attacked.astype(int) - pictures.clean
    assert 0 < np.abs(change).max() <= EPS * 255 + 1
    worst = aggregation.correct_by_attack(evaluated.rows)["mixed", None]["worst"]
    assert {i for i, stands in worst.items() if not stands} <= set(pictures.index.tolist())
    with torch.no_grad():
        p = mixed.robust(pixels(torch.from_numpy(pictures.clean))).softmax(dim=1).numpy()
    shown = np.take_along_axis(p, pictures.top_classes[0, 1], axis=1)
    assert np.allclose(shown, pictures.top_probabilities[0, 1], atol=1e-6)
    labels = data.labels.numpy()[pictures.index]
    assert (pictures.top_classes == labels[None, None, :, None]).any(axis=-1).all()


def test_the_networks_are_run_once_per_point_and_on_the_pictures_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The nearest point of an image is the one whose verdict had the smallest margin: no network
    judges it again."""
    calls, real = list[str](), PointRecorder._outputs

    def outputs(
        recorder: PointRecorder, model: torch.nn.Module, images: torch.Tensor
    ) -> torch.Tensor:
        calls.extend(name for name, own in recorder.models.items() if own is model)
        return real(recorder, model, images)

    stored = dict[int, list[float]]()
    finish = PointRecorder.finish

    def read(recorder: PointRecorder, rows: Any) -> Any:
        for content in (content for _, content in recorder._read() if "margin" in content):
            for image, margin in zip(
                content["image_index"].tolist(), content["margin"].tolist(), strict=True
            ):
                stored.setdefault(image, []).append(margin)
        return finish(recorder, rows)

    monkeypatch.setattr(PointRecorder, "_outputs", outputs)
    monkeypatch.setattr(PointRecorder, "finish", read)
    run(tmp_path / "run")
    assert calls.count("mixed") == 2, "the pictures, clean and attacked"
    assert calls.count("accurate") == 3, "the same, and all clean images"
    assert calls.count("robust") == 3, "its outputs at attacked points come with the verdicts"
    assert stored and all(
        margins == sorted(set(margins), reverse=True) for margins in stored.values()
    )


def test_several_processes_store_what_one_stores(tmp_path: Path) -> None:
    """Images change their process for the audit, and models are checked by different processes."""
    models, data = (
        [mixture() for _ in range(3)],
        labelled_by(mixture(), 12),
    )  # made before the threads

    def evaluate_in(name: str, model: MixedClassifier) -> Evaluation:
        return evaluate(
            model,
            data,
            threat=Threat("linf", EPS),
            attack=Suite(SUITE.attacks, name="fast"),
            audit=3,
            out=tmp_path / name,
            device="cpu",
            batch_size=16,
            adaptive="none",
        )

    alone = evaluate_in("one", models[2])
    for other in run_processes(2, lambda rank: evaluate_in("two", models[rank])):
        assert other.rows == alone.rows and other.results == alone.results
        assert (
            other.summary.sanity_checks == alone.summary.sanity_checks
            and alone.summary.sanity_checks
        )
    for kind in (PictureArrays, FrontierArrays):
        one, two = (kind.load(tmp_path / name) for name in ("one", "two"))
        assert one is not None and two is not None
        for name, value in vars(one).items():
            assert np.array_equal(
                value,
                getattr(two, name),
                equal_nan=isinstance(value, np.ndarray) and value.dtype.kind == "f",
            ), name


def test_of_equal_points_the_first_is_shown_whatever_process_found_it(tmp_path: Path) -> None:
    mixed, data = mixture(), labelled_by(mixture(), 12)
    job = Job("mixed", mixed, "adaptive", SUITE)
    points = [torch.full((1, *data.image_shape), value) for value in (0.1, 0.2, 0.3)]
    for rank, point in zip((1, 0, 1), points, strict=True):
        run = SimpleNamespace(folder=tmp_path, world=SimpleNamespace(rank=rank))
        recorder = PointRecorder(run, data, CONDITIONS, [job])  # type: ignore[arg-type]
        recorder.record(job, [int(data.index[0])], point, torch.tensor([0.5]))
    nearest = recorder._nearest(recorder._read(), {int(data.index[0])})
    assert torch.equal(nearest[int(data.index[0])], points[0][0])


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_scripted_base_has_the_same_estimate(tmp_path: Path) -> None:
    """It takes no hooks, which read the outputs of other networks."""
    mixed = mixture()
    scripted = MixedClassifier(
        mixed.accurate,
        torch.jit.script(mixed.robust),
        mixed.alpha,
        logit_map=SWITCH,
        hard=True,
        frontier=FRONTIER,
    ).eval()
    frontiers = []
    for name, model in (("eager", mixed), ("scripted", scripted)):
        evaluate(
            model,
            labelled_by(mixed, 12),
            threat=Threat("linf", EPS),
            attack=SUITE,
            out=tmp_path / name,
            device="cpu",
            adaptive="none",
        )
        frontiers.append(frontier_of(tmp_path / name))
    for own, other in zip(*(frontier.standing for frontier in frontiers), strict=True):
        assert np.array_equal(own, other)


def test_a_base_in_training_mode_is_left_as_it_is(tmp_path: Path) -> None:
    """Also where a model of equal weights is evaluated beside the mixture."""
    mixed = MixedClassifier(linear_model(), SmallNet(), 1 / 1.4, logit_map=SWITCH, hard=True)
    data, own = random_images(12, labels_of=mixed), copy.deepcopy(mixed.robust)
    mixed.train()
    norm = mixed.robust.norm
    assert isinstance(norm, torch.nn.BatchNorm2d) and norm.running_mean is not None
    before = norm.running_mean.clone()
    evaluate(
        {"own": own, "mixed": mixed},
        data,
        threat=Threat("linf", EPS),
        attack=SUITE,
        out=tmp_path / "run",
        device="cpu",
        adaptive="none",
    )
    assert torch.equal(norm.running_mean, before) and norm.training
    assert frontier_of(tmp_path / "run").standing.size


def test_recording_changes_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quick(tmp_path / "with")
    monkeypatch.setattr(EvaluationPlan, "points", lambda self, folder, conditions: None)
    quick(tmp_path / "without")
    assert (tmp_path / "with/rows.jsonl").read_bytes() == (
        tmp_path / "without/rows.jsonl"
    ).read_bytes()
    assert FrontierArrays.load(tmp_path / "without") is None


@pytest.mark.parametrize("writes", [10, 12])
def test_a_killed_run_ends_with_the_same_arrays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writes: int
) -> None:
    quick(tmp_path / "whole")
    run_until_killed(monkeypatch, writes, lambda: quick(tmp_path / "killed"))
    assert (tmp_path / "killed" / "points").exists()
    quick(tmp_path / "killed")
    for group in (FrontierArrays, PictureArrays):
        whole, resumed = (group.load(tmp_path / name) for name in ("whole", "killed"))
        assert whole is not None and resumed is not None
        for name, array in whole.to_dict().items():
            assert np.array_equal(
                array, resumed.to_dict()[name], equal_nan=array.dtype.kind == "f"
            ), name
    assert sorted(path.name for path in (tmp_path / "killed").iterdir()) == sorted(
        path.name for path in (tmp_path / "whole").iterdir()
    )


def test_a_finished_run_keeps_its_bytes(tmp_path: Path) -> None:
    quick(tmp_path / "run")
    before = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    quick(tmp_path / "run")
    assert {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before


def test_without_all_points_there_is_no_estimate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that an older version began has rows without points."""
    run_until_killed(monkeypatch, 12, lambda: quick(tmp_path / "run"))
    shutil.rmtree(tmp_path / "run" / "points")
    quick(tmp_path / "run")
    assert FrontierArrays.load(tmp_path / "run") is None


def test_points_without_margins_give_no_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older version stored attacked images alone; which of them is nearest is not known."""
    run_until_killed(monkeypatch, 14, lambda: quick(tmp_path / "run"))
    parts = {
        path: safetensors.torch.load_file(path)
        for path in (tmp_path / "run" / "points").glob("*.safetensors")
    }
    assert any("margin" in content for content in parts.values())
    for path, content in parts.items():
        safetensors.torch.save_file(
            {name: value for name, value in content.items() if name != "margin"}, path
        )
    quick(tmp_path / "run")
    assert PictureArrays.load(tmp_path / "run") is None


def test_models_without_a_mixture_have_pictures_alone(tmp_path: Path) -> None:
    data = random_images(labels_of=SmallNet())
    evaluate(
        {"m": SmallNet().eval(), "n": linear_model().eval()},
        data,
        threat=Threat("linf", 0.02),
        attack=SUITE,
        out=tmp_path / "run",
        device="cpu",
        batch_size=4,
    )
    pictures = PictureArrays.load(tmp_path / "run")
    assert pictures is not None and (pictures.model, pictures.models) == ("m", ("m", "n"))
    assert FrontierArrays.load(tmp_path / "run") is None


@pytest.mark.parametrize(
    "shape", [(223, 223), (224, 224), (299, 299), (1, 90_000), (90_000, 1), (60_000, 3)]
)
def test_large_images_are_sampled(shape: tuple[int, int]) -> None:
    """Rows and columns of the image remain, so that a perturbation keeps its size."""
    limit = MAX_PIXELS // MIN_PICTURES
    image = torch.arange(shape[0] * shape[1]).reshape(1, 1, *shape)
    small = sampled(image, limit)
    height, width = small.shape[2:]
    assert height * width <= limit and (height * width > 0.7 * limit or 1 in (height, width))
    assert torch.isin(small, image).all() and (small.flatten().diff() > 0).all()
    assert sampled(image[:, :, :200, :200], limit).shape[2:] == image[:, :, :200, :200].shape[2:]


def test_pictures_of_large_images_stay_within_the_limit(tmp_path: Path) -> None:
    side = 256
    images = torch.randint(
        0, 256, (14, 1, side, side), generator=torch.Generator().manual_seed(0), dtype=torch.uint8
    )
    model = torch.nn.Sequential(
        torch.nn.AdaptiveAvgPool2d(2), torch.nn.Flatten(), torch.nn.Linear(4, 3)
    ).eval()
    with torch.no_grad():
        labels = model(pixels(images)).argmax(dim=1)
    evaluate(
        model,
        (images, labels),
        threat=Threat("linf", 0.4),
        attack="pgd",
        steps=1,
        out=tmp_path / "run",
        device="cpu",
    )
    pictures, shown = PictureArrays.load(tmp_path / "run"), AttackedArrays.load(tmp_path / "run")
    assert pictures is not None and shown is not None and len(pictures.index) == MIN_PICTURES
    assert 0.9 * MAX_PIXELS < pictures.clean[:, 0].size <= MAX_PIXELS
    assert (
        np.abs(pictures.attacked.astype(int) - pictures.clean).max() == 102
    )  # averages would be smaller
    assert shown.clean[0, 0].size <= 128 * 128
