"""The public function `evaluate`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import CONDITIONS, AtMostFour, SmallNet, linear_model, random_images
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from equipoise import models, reporting
from equipoise.attacks import Apgd, Attack, Clean, Pgd, Square, Suite
from equipoise.core.checks import EquipoiseWarning, InputError
from equipoise.core.promises import Target
from equipoise.core.results import read_summary
from equipoise.core.threat import Threat
from equipoise.data import load_data, pixels
from equipoise.evaluation import Evaluation, Job, certify, evaluate, open_run, run_jobs
from equipoise.fitting import fit
from equipoise.mixing import MixedClassifier
from equipoise.mixing.provenance import Provenance
from equipoise.models import checkpoint

THREAT = CONDITIONS.threat
CHECKS = {
    "train mode",
    "randomness",
    "batch-size dependence",
    "probabilities for logits",
    "infinite logits",
    "vanishing gradients",
    "accuracy rises with budget",
}


def run(models: Any, out: Path | None = None, attack: Any = "pgd", **settings: Any) -> Evaluation:
    return evaluate(
        models,
        random_images(),
        threat=THREAT,
        attack=attack,
        out=out,
        device="cpu",
        **{"batch_size": 4, **({"steps": 3} if attack == "pgd" else {}), **settings},
    )


def mixture(**settings: Any) -> MixedClassifier:
    return MixedClassifier(linear_model(0), linear_model(1), 0.8, **settings)


def test_results_are_the_accuracies_of_the_rows(tmp_path: Path) -> None:
    data, result = random_images(), run({"m": linear_model()}, tmp_path / "run")
    clean = float((linear_model()(pixels(data.images)).argmax(1) == data.labels).float().mean())
    assert result.result("m", "clean").value == pytest.approx(clean)
    assert result.result("m", "worst").value == result.result("m", "pgd").value <= clean
    assert read_summary(tmp_path / "run").results == result.results
    assert len(result.rows) == 22 and result.to_dict()["command"] == "evaluate"


def test_a_finished_run_is_read_not_repeated(tmp_path: Path) -> None:
    first = run({"m": linear_model()}, tmp_path / "run")
    written = (tmp_path / "run" / "summary.json").stat().st_mtime_ns
    assert run({"m": linear_model()}, tmp_path / "run").results == first.results
    assert (tmp_path / "run" / "summary.json").stat().st_mtime_ns == written


def test_without_a_folder_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert len(run(linear_model()).results) == 3 and list(tmp_path.iterdir()) == []


def test_the_table_has_every_model_and_metric() -> None:
    text = str(run({"first": linear_model(0), "second": linear_model(1)}))
    assert all(
        word in text
        for word in ("first", "second", "clean", "pgd", "worst", "11 images", "ℓ∞ ≤ 0.05")
    )


def test_data_may_be_tensors_or_loaders() -> None:
    data = random_images()
    x, y = pixels(data.images), data.labels
    values = [
        evaluate(linear_model(), given, threat=THREAT, attack="pgd", steps=3, device="cpu")
        .result("model", "worst")
        .count
        for given in (
            (x, y),
            (data.images, y),
            TensorDataset(x, y),
            DataLoader(TensorDataset(x, y), 4),
        )
    ]
    assert len(set(values)) == 1


def test_labels_need_not_contain_the_last_classes() -> None:
    data = random_images()
    few = data.labels.clamp(max=3)
    result = evaluate(linear_model(), (data.images, few), threat=THREAT, attack="pgd", steps=1)
    assert result.result("model", "clean").n == 11


def test_a_mixture_is_evaluated_beside_its_bases(tmp_path: Path) -> None:
    result = run(mixture(), tmp_path / "run")
    assert {r.model for r in result.results} == {"accurate", "robust", "mixed"}
    assert {(d.model, d.versus) for d in result.summary.differences} == {
        ("mixed", "robust"),
        ("mixed", "accurate"),
    }
    assert [cost.model for cost in result.summary.costs] == [
        "accurate",
        "robust",
        "mixed",
        "mixed, gated",
    ]


def test_several_mixtures_of_one_pair_come_beside_its_bases_once() -> None:
    accurate, robust = linear_model(0), linear_model(1)
    named = {str(alpha): MixedClassifier(accurate, robust, alpha) for alpha in (0.6, 0.8)}
    result = run(named)
    assert {r.model for r in result.results} == {"accurate", "robust", "0.6", "0.8"}
    assert {(d.model, d.versus) for d in result.summary.differences} == {
        (name, base) for name in named for base in ("accurate", "robust")
    }
    for name, model in named.items():
        alone = run(model)
        assert alone.result("mixed", "worst").value == result.result(name, "worst").value
    other = MixedClassifier(accurate, linear_model(2), 0.7)
    models_of_rows = {r.model for r in run({**named, "0.7": other}).results}
    assert {"0.6 robust", "0.8 robust", "0.7 robust", "0.7 mixed"} <= models_of_rows


def test_mixtures_in_folders_share_their_bases_if_these_are_the_same_files(tmp_path: Path) -> None:
    paths = [tmp_path / "bases" / f"{name}.safetensors" for name in ("accurate", "robust")]
    for seed, path in enumerate(paths):
        path.parent.mkdir(exist_ok=True)
        checkpoint.save(
            path, models.build("cnn_small", num_classes=10, image_shape=(1, 8, 8), seed=seed)
        )
    folders = []
    for name, robust in (("a", paths[1]), ("b", paths[1]), ("c", f"tta:2:{paths[1]}")):
        fit(str(paths[0]), str(robust), None, threat=THREAT, alpha=0.7, out=tmp_path / name)
        folders.append(f"mixture:{tmp_path / name}")
    data = load_data("digits", count=4)
    both = evaluate(folders[:2], data, threat=THREAT, attack="pgd", steps=2, device="cpu")
    assert {r.model for r in both.results} == {"accurate", "robust", *folders[:2]}
    views = evaluate(folders[::2], data, threat=THREAT, attack="pgd", steps=2, device="cpu")
    assert {f"{name} robust" for name in folders[::2]} <= {r.model for r in views.results}


def test_a_mixture_that_hides_its_gradients_is_attacked_adaptively() -> None:
    result = run(
        mixture(hard=True),
        attack=Suite(attacks=(Apgd(steps=3), Square(queries=5))),
        adaptive="surrogate,through",
    )
    metrics = {r.metric for r in result.results if r.model == "mixed"}
    assert {"adaptive", "adaptive-through"} <= metrics
    assert result.result("mixed", "worst").value <= result.result("mixed", "adaptive").value


def test_images_used_for_fitting_are_reported() -> None:
    fitted = mixture(provenance=Provenance.of(random_images().slice(2, 3), "promise"))
    with pytest.warns(EquipoiseWarning, match="mixed was fitted on images 52-54 of these"):
        assert run(fitted).summary.overlap == {"mixed": ("52-54",)}


def test_local_lipschitz_estimates_of_the_robust_model(tmp_path: Path) -> None:
    result = run(mixture(), tmp_path / "run", estimate=True)
    assert {r.model for r in result.lipschitz} == {"robust"} and "not certificates" in str(result)
    assert (tmp_path / "run" / "estimate" / "summary.json").exists()


@pytest.mark.parametrize(
    "change",
    [
        {"threat": Threat("linf", 0.1)},
        {"models": {"m": linear_model(1)}},
        {"steps": 4},
        {"attack": Pgd(steps=3, step_size=0.1), "steps": None},
        {"attack": Pgd(steps=3, surrogate=linear_model(1)), "steps": None},
        {"seed": 1},
    ],
)
def test_another_model_threat_attack_or_seed_is_another_run(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    given: dict[str, Any] = {
        "models": {"m": linear_model()},
        "threat": THREAT,
        "attack": "pgd",
        "steps": 3,
    }
    evaluate(given.pop("models"), random_images(), out=tmp_path / "run", device="cpu", **given)
    changed = {
        "models": {"m": linear_model()},
        "threat": THREAT,
        "attack": "pgd",
        "steps": 3,
        **change,
    }
    with pytest.raises(InputError, match="`out` must be a new folder or belong to this run"):
        evaluate(
            changed.pop("models"), random_images(), out=tmp_path / "run", device="cpu", **changed
        )


class RoundedLogits(nn.Module):
    """No gradient anywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.base = linear_model()

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.base(x)
        return logits.round()


@pytest.mark.usefixtures("figures_once")
def test_sanity_checks_of_every_attack_are_in_the_summary(tmp_path: Path) -> None:
    run({"m": RoundedLogits()}, tmp_path / "run")
    checks = {check.name: check for check in read_summary(tmp_path / "run").sanity_checks}
    assert set(checks) == CHECKS and checks["vanishing gradients"].alarm
    assert "vanishing gradients" in reporting.report(tmp_path / "run").read_text(encoding="utf-8")


def test_gradients_are_checked_where_the_attack_takes_them() -> None:
    summary = run({"m": RoundedLogits()}, attack=Pgd(steps=3, surrogate=linear_model())).summary
    assert not any(
        check.alarm for check in summary.sanity_checks if check.name == "vanishing gradients"
    )


def test_a_suite_with_and_without_gradients_is_compared() -> None:
    suite = Suite(attacks=(Apgd(loss="margin", steps=9), Square(queries=60)))
    summary = evaluate(
        {"m": SmallNet().eval()},
        random_images(20, labels_of=SmallNet()),
        threat=Threat("linf", 0.02),
        attack=suite,
        device="cpu",
    ).summary
    assert {check.name for check in summary.sanity_checks} == CHECKS | {"black box beats white box"}


def test_sanity_checks_use_as_many_images_as_fit_into_memory() -> None:
    assert len(run({"m": AtMostFour()}).summary.sanity_checks) == len(CHECKS)


def test_jobs_with_alpha_have_results_of_their_own(tmp_path: Path) -> None:
    jobs = [
        Job("mixed", linear_model(seed), "clean", Clean(), alpha)
        for seed, alpha in ((0, 0.1), (1, 0.2))
    ]
    summary = run_jobs(
        jobs,
        random_images(),
        CONDITIONS,
        open_run(tmp_path / "run", jobs, random_images(), CONDITIONS),
    )
    assert [result.alpha for result in summary.results] == [0.1, 0.2]


class ReturnsTwoTensors(nn.Module):
    """None of which is called logits."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"one": x.flatten(1)[:, :6], "two": x.flatten(1)[:, :6]}


@pytest.mark.parametrize(
    ("models", "message"),
    [
        ({}, "at least one model"),
        ({"m": nn.Conv2d(3, 6, 1)}, "`logits of m` must have shape"),
        ({"m": ReturnsTwoTensors()}, "`m` must return one tensor, got 'dict'"),
        (
            {"m": nn.Linear(9, 6)},
            r"`m` must take images of shape \(3, 5, 7\), but raised RuntimeError",
        ),
        (
            {"m": nn.Sequential(nn.Flatten(), nn.Linear(105, 3))},
            "`m` must have as many classes as random, 6, got 3",
        ),
    ],
)
def test_unusable_models_are_one_sentence(models: dict[str, nn.Module], message: str) -> None:
    with pytest.raises(InputError, match=message):
        run(models)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"adaptive": "surogate"}, r"did you mean 'surrogate'\?"),
        ({"source": "rob"}, "be mix where no model is a mixture"),
        ({"batch_size": 0}, "`batch_size` must be"),
        ({"stepz": 3}, r"did you mean 'steps'\?"),
        ({"estimate": 1}, "`estimate` must be true or false"),
        ({"attack": "pdg"}, r"did you mean 'pgd'\?"),
        ({"attack": Pgd(), "steps": 3}, "`steps` must be left out beside an attack object"),
    ],
)
def test_unusable_settings_are_one_sentence(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        run(linear_model(), **settings)


def test_images_with_one_index_twice_are_refused() -> None:
    with pytest.raises(InputError, match="`images` must have an index each"):
        evaluate(
            linear_model(),
            random_images().take(torch.tensor([0, 1, 1])),
            threat=THREAT,
            device="cpu",
        )


def test_attacks_of_a_suite_may_have_gradients_from_elsewhere() -> None:
    attack: Attack = replace(Pgd(steps=3), surrogate=linear_model(3))
    assert run({"m": linear_model()}, attack=attack).result("m", "worst").n == 11


def test_rows_do_not_depend_on_the_number_of_threads(tmp_path: Path) -> None:
    """With convolutions that are large enough to be shared by threads."""
    images, before = load_data("shapes", split="test", count=16), torch.get_num_threads()
    model = models.build(
        "resnet8", num_classes=images.num_classes, image_shape=images.image_shape, seed=1
    ).eval()
    rows = {}
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            evaluated, certified = (
                tmp_path / f"evaluated-{threads}",
                tmp_path / f"certified-{threads}",
            )
            evaluate(
                {"m": model},
                images,
                threat=THREAT,
                attack="pgd",
                steps=2,
                out=evaluated,
                device="cpu",
            )
            certify(
                {"m": model},
                images.slice(0, 2),
                sigma=0.25,
                samples=100,
                n0=20,
                out=certified,
                device="cpu",
            )
            rows[threads] = [(out / "rows.jsonl").read_bytes() for out in (evaluated, certified)]
    finally:
        torch.set_num_threads(before)
    assert rows[1] == rows[2]


def promised(target: Target | None, **changes: Any) -> MixedClassifier:
    """A mixture that was fitted on other images."""
    provenance = Provenance("random", "test", ("0-9",), "promise", target=target, threat=THREAT)
    return mixture(provenance=replace(provenance, **changes))


@pytest.mark.parametrize(
    "target", [Target(0.0), Target(1.0), Target(0.3, of_robust=True, confidence=0.95)]
)
@pytest.mark.usefixtures("figures_once")
def test_whether_a_promise_was_kept_is_said(tmp_path: Path, target: Target) -> None:
    """Under a weaker threat than that of the fit, so that the robust model survives on some
    images."""
    result = evaluate(
        promised(target),
        random_images(labels_of=linear_model(1)),
        threat=Threat("linf", 0.002),
        attack="pgd",
        steps=3,
        out=tmp_path / "run",
        device="cpu",
        batch_size=4,
    )
    check = only(result.summary.promises)
    robust, mixed = (result.result(name, "worst") for name in ("robust", "mixed"))
    loss = (robust.count - mixed.count) / (robust.count if target.of_robust else robust.n)
    assert (
        check.value == pytest.approx(loss)
        and check.low <= check.value <= check.high
        and check.n == 11
    )
    assert check.kept is (loss <= target.share) and check.promised == target
    assert read_summary(tmp_path / "run").promises == result.summary.promises
    assert f"mixed: {check.explanation}" in str(result)
    report = reporting.report(tmp_path / "run").read_text("utf-8")
    assert f"the promise was {'kept' if check.kept else 'exceeded'}" in report


def only(values: tuple[Any, ...]) -> Any:
    assert len(values) == 1
    return values[0]


@pytest.mark.parametrize(
    "model",
    [
        mixture(),
        promised(Target(0.1), threat=Threat("l2", 1.0)),
        promised(Target(0.1), threat=Threat("linf", 0.01)),
        promised(Target(0.1), images=("50-51",)),
        promised(None),
    ],
)
@pytest.mark.filterwarnings("ignore::equipoise.core.checks.EquipoiseWarning")
def test_nothing_is_said_where_no_promise_applies(model: MixedClassifier) -> None:
    """No fit, another norm, a larger radius than the fit's, images that it was fitted on, no
    target."""
    assert run(model).summary.promises == ()
