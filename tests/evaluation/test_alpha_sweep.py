"""One pair at several alphas: `evaluate(..., alphas=…)` [Bai2024, Figure 4]."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import CONDITIONS, SmallNet, linear_model, random_images
from torch import Tensor, nn

from equipoise import reporting
from equipoise.attacks import TransferPgd
from equipoise.core.checks import InputError
from equipoise.core.rows import AttackRow
from equipoise.core.threat import Threat
from equipoise.evaluation import Evaluation, evaluate
from equipoise.evaluation.alpha_sweep import parse_alphas
from equipoise.mixing import GatedClassifier, HardLabels, LogitMap, MixedClassifier
from equipoise.reporting.fit import alphas
from equipoise.reporting.run_view import read_run

THREAT = CONDITIONS.threat


def sweep(
    models: Any, alphas: Any = "0.3,0.8", out: Path | None = None, **settings: Any
) -> Evaluation:
    options = {"attack": "pgd", "steps": 3, "batch_size": 4, **settings}
    return evaluate(
        models, random_images(), threat=THREAT, alphas=alphas, out=out, device="cpu", **options
    )


def correct(result: Evaluation, attack: str, alpha: float | None) -> list[bool]:
    rows = [
        row
        for row in result.rows
        if isinstance(row, AttackRow) and (row.attack, row.alpha) == (attack, alpha)
    ]
    return [row.correct for row in sorted(rows, key=lambda row: row.index)]


def test_the_ends_are_the_bases() -> None:
    """On linear models PGD of a few steps is exact, so that at alpha 0 std equals mix, and at alpha
    1 rob does."""
    bases = linear_model(0), linear_model(1)
    result = sweep([*bases], [0, 0.5, 1])
    assert {(r.model, r.metric) for r in result.results} == {
        ("mixed", metric) for metric in ("clean", "std", "rob", "mix", "worst")
    }
    for alpha, base, own in ((0.0, bases[0], "std"), (1.0, bases[1], "rob")):
        alone = evaluate(
            {"m": base},
            random_images(),
            threat=THREAT,
            attack="pgd",
            steps=3,
            batch_size=4,
            device="cpu",
        )
        assert correct(result, "clean", alpha) == correct(alone, "clean", None)
        assert (
            correct(result, "mix", alpha)
            == correct(alone, "pgd", None)
            == correct(result, own, alpha)
        )


def test_a_mixture_and_its_two_bases_are_the_same_sweep() -> None:
    bases = linear_model(0), linear_model(1)
    assert sweep(MixedClassifier(*bases, 0.9)).rows == sweep({"g": bases[0], "h": bases[1]}).rows


def test_transferred_images_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    attacked: list[int] = []
    run = TransferPgd.run

    def counted(self: TransferPgd, model: nn.Module, x: Tensor, y: Tensor, **more: Any) -> Tensor:
        attacked.append(len(x))
        return run(self, model, x, y, **more)

    monkeypatch.setattr(TransferPgd, "run", counted)
    result = sweep([linear_model(0), linear_model(1)], [0.2, 0.5, 0.8])
    assert sum(attacked) == 2 * 11 and {r.n for r in result.results} == {11}


def test_a_resumed_sweep_has_the_same_rows(tmp_path: Path) -> None:
    whole = sweep([SmallNet().eval(), linear_model(1)], out=tmp_path / "a")
    path = tmp_path / "a" / "rows.jsonl"
    lines = path.read_text().splitlines()
    path.write_text(
        "\n".join(line for line in lines if '"std"' not in line or "0.8" not in line) + "\n"
    )
    (tmp_path / "a" / "summary.json").unlink()
    assert sweep([SmallNet().eval(), linear_model(1)], out=tmp_path / "a").rows == whole.rows


def test_a_map_stays_and_its_hidden_gradients_are_replaced() -> None:
    mixture = MixedClassifier(
        linear_model(0), linear_model(1), 0.7, logit_map=LogitMap(2.0, 1.0, 0.0), hard=True
    )
    result = sweep(mixture, "0.6,0.9", adaptive="surrogate,through")
    assert {r.metric for r in result.results} == {
        "clean",
        "std",
        "rob",
        "mix",
        "mix-through",
        "worst",
    }
    at = MixedClassifier(
        linear_model(0), linear_model(1), 0.6, logit_map=LogitMap(2.0, 1.0, 0.0), hard=True
    )
    data = random_images()
    clean = at(data.images / 255).argmax(dim=1) == data.labels
    assert correct(result, "clean", 0.6) == clean.tolist()


@pytest.mark.parametrize(
    ("trust", "space", "metrics"),
    [("constant", "probabilities", {"mix"}), ("gradient", "logits", {"mix", "mix-soft"})],
)
def test_rules_of_local_smoothing(trust: str, space: str, metrics: set[str]) -> None:
    """Averaged, constant, over probabilities is plain mixing; added has no strength 1."""
    pair = [linear_model(0), linear_model(1)]
    result = sweep(pair, "0.3,0.8", smoothing="averaged", trust=trust, space=space)
    assert {r.metric for r in result.results} == {"clean", "std", "rob", "worst", *metrics}
    if trust == "constant":
        plain = sweep(pair, "0.3,0.8")
        assert [correct(result, name, 0.8) for name in ("clean", "std", "mix")] == [
            correct(plain, name, 0.8) for name in ("clean", "std", "mix")
        ]


def test_added_is_the_published_rule() -> None:
    """(3.1) for linear models: g_i + γ ‖w_i‖₁ h_i, with the dual of ℓ∞, at γ = 3."""
    g, h, data = linear_model(0), linear_model(1), random_images()
    result = sweep([g, h], "0.75", smoothing="added", trust="gradient")
    x, norms = (data.images / 255), g[1].weight.abs().sum(dim=1)  # type: ignore[index]
    expected = (g(x) + 3 * norms * h(x)).argmax(dim=1) == data.labels
    assert correct(result, "clean", 0.75) == expected.tolist()


def test_binary_smoothing_of_two_classes() -> None:
    torch.manual_seed(0)
    g, h = (nn.Sequential(nn.Flatten(), nn.Linear(105, 2)) for _ in range(2))
    data = random_images()
    images, labels = data.images / 255, data.labels % 2
    result = evaluate(
        [g, h],
        (images, labels),
        threat=THREAT,
        attack="pgd",
        steps=2,
        alphas=0.5,
        smoothing="binary",
        device="cpu",
    )
    weight = g[1].weight[1] - g[1].weight[0]  # type: ignore[index]
    z, votes = g(images), h(images)
    score = z[:, 1] - z[:, 0] + (votes[:, 1] - votes[:, 0]).sign() * weight.abs().sum()
    assert correct(result, "clean", 0.5) == ((score > 0).long() == labels).tolist()


@pytest.mark.parametrize(
    ("models", "settings", "message"),
    [
        (
            [linear_model()],
            {},
            "`models` must be one mixture without a gate, or the accurate and the robust model",
        ),
        ([linear_model(), linear_model(1), linear_model(2)], {}, "`models` must be one mixture"),
        (
            [linear_model(), linear_model(1)],
            {"alphas": "0.5,1.5"},
            r"`alphas` must lie in \[0, 1\], got 1.5",
        ),
        ([linear_model(), linear_model(1)], {"alphas": [0.5, 0.5]}, "`alphas` must be different"),
        ([linear_model(), linear_model(1)], {"alphas": "half"}, "`alphas` must be a number"),
        (
            [linear_model(), linear_model(1)],
            {"source": "std"},
            "`source` must be left out with `alphas`",
        ),
        (
            [linear_model(), linear_model(1)],
            {"audit": 3, "attack": "fast", "steps": None},
            "`audit` must be left out with",
        ),
        (
            [linear_model(), linear_model(1)],
            {"trust": "ratio"},
            "`trust` must come with `smoothing`",
        ),
        (
            [linear_model(), linear_model(1)],
            {"smoothing": "binary", "space": "probabilities"},
            "`space` must come with",
        ),
        (
            [linear_model(), linear_model(1)],
            {"smoothing": "added", "alphas": 1},
            "`alphas` must be less than 1",
        ),
        (
            [linear_model(), linear_model(1)],
            {"alphas": None, "smoothing": "added"},
            "`smoothing` must come with `alphas`",
        ),
        (
            MixedClassifier(
                HardLabels(lambda x: x[:, 0, 0, 0].long()), linear_model(), 0.6, hard=True
            ),
            {},
            "`stand_in` must be given for `alphas`",
        ),
        (
            MixedClassifier(linear_model(), linear_model(), 0.6, hard=True),
            {"smoothing": "added"},
            "`smoothing` must be left out for a mixture with",
        ),
    ],
)
def test_mistakes(models: Any, settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        sweep(models, out=tmp_path / "run", **{"alphas": "0.5", **settings})
    assert not (tmp_path / "run").exists()


def test_a_gate_has_no_alpha_of_its_own() -> None:
    class Gated(GatedClassifier):
        def __init__(self) -> None:
            MixedClassifier.__init__(self, linear_model(), linear_model(1), 0.5)

    with pytest.raises(InputError, match="one mixture without a gate"):
        sweep(Gated())


def test_parsing() -> None:
    assert (
        parse_alphas("0.9, 1/2") == (0.5, 0.9)
        and parse_alphas([1, 0]) == (0, 1)
        and parse_alphas(0.5) == (0.5,)
    )


def test_the_report_has_the_figure(tmp_path: Path) -> None:
    result = sweep([linear_model(0), linear_model(1)], out=tmp_path / "run")
    text = str(result)
    assert "alpha 0.3" in text and all(name in text for name in ("std", "rob", "mix"))
    html = reporting.report(tmp_path / "run").read_text(encoding="utf-8")
    assert (
        "Accuracy against alpha" in html and (tmp_path / "run" / "figures" / "alpha.svg").exists()
    )


def test_the_report_has_the_accuracy_at_every_alpha(tmp_path: Path) -> None:
    g, h = linear_model(0), linear_model(1)
    data = random_images()
    labels = g(data.images / 255).argmax(dim=1)
    evaluate(
        [g, h],
        (data.images / 255, labels),
        threat=Threat("linf", 0.3),
        attack="pgd",
        steps=3,
        alphas="0.1,0.2",
        out=tmp_path / "run",
        device="cpu",
    )
    run = read_run(tmp_path / "run")
    section = alphas(run)
    assert section is not None
    drawn = section.figures[0].records
    for metric, name in (("clean", "clean accuracy"), ("worst", "robust accuracy")):
        expected = [(item.alpha, round(item.value, 5)) for item in run.alphas("mixed", metric)]
        assert [(own["x"], own["y"]) for own in drawn if own["model"] == name] == expected


def test_own_gradients_of_a_mixture_that_hides_them_are_a_column_if_asked_for() -> None:
    mixture = MixedClassifier(linear_model(0), linear_model(1), 0.8, hard=True)
    metrics = {
        kind: {r.metric for r in sweep(mixture, adaptive=kind).results}
        for kind in ("surrogate", "surrogate,own-gradients", "none")
    }
    assert metrics["surrogate"] == metrics["none"] == {"clean", "std", "rob", "mix", "worst"}
    assert metrics["surrogate,own-gradients"] == metrics["surrogate"] | {"mix-own-gradients"}
    with pytest.raises(InputError, match="`adaptive` must be none alone"):
        sweep(mixture, adaptive="none,surrogate")


def test_the_temperature_of_a_mixture_stays() -> None:
    bases = linear_model(0), linear_model(1)
    images = random_images()
    mixture = MixedClassifier(*bases, 0.55, accurate_temperature=0.05).eval()
    predicted = mixture(images.images.float() / 255).argmax(dim=1)
    plain = MixedClassifier(*bases, 0.55).eval()(images.images.float() / 255).argmax(dim=1)
    assert not torch.equal(predicted, plain), "the temperature matters on these images"
    assert correct(sweep(mixture, [0.55]), "clean", 0.55) == (predicted == images.labels).tolist()
