"""The comparison of mixing rules: shared attacks, equal mixtures, resuming, gates, and the exported
rows."""

from __future__ import annotations

import dataclasses
import runpy
import shutil
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import equipoise as eq
from equipoise import evaluation, models
from equipoise.attacks import Apgd, Pgd
from equipoise.core import progress, progress_display
from equipoise.core.checks import EquipoiseWarning
from equipoise.core.results import read_summary
from equipoise.data import Dataset
from equipoise.evaluation import Conditions, Job
from equipoise.evaluation.plan import EvaluationPlan, select_attacks
from equipoise.fitting import FitSettings, gated
from equipoise.mixing import GatedClassifier, LogitMap, load_gate, load_model, new_gate, save_gate
from equipoise.mixing.logit_maps import confidence_switch
from equipoise.mixing.provenance import RULES
from equipoise.models import checkpoint
from equipoise.studies import attack_list, comparison_table
from equipoise.studies.comparison_settings import COMPARED, ComparisonSettings
from equipoise.studies.comparison_table import describe, measured_as
from equipoise.studies.rule_comparison import name_gates, without_fitting_images

ROOT = Path(__file__).parents[2]
THREAT = eq.Threat("linf", 0.004)
QUICK: dict[str, Any] = {
    "threat": THREAT,
    "attack": "pgd",
    "margin_steps": 2,
    "margin_targets": 1,
    "candidates": 1,
    "range_count": 20,
    "lose_at_most": 10,
    "device": "cpu",
}


class Linear(nn.Module):
    """A linear model whose features a gate can read."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x: Tensor) -> Tensor:
        return (x.flatten(1) - 0.5) @ self.weight.T


def bases() -> tuple[nn.Module, nn.Module]:
    generator = torch.Generator().manual_seed(0)
    weight, noise = (torch.randn(4, 48, generator=generator) for _ in range(2))
    return Linear(3 * weight), Linear(weight + 0.7 * noise)


def images(count: int = 80, start: int = 0) -> Dataset:
    pixels = torch.randint(
        0,
        256,
        (count, 3, 4, 4),
        generator=torch.Generator().manual_seed(1 + start),
        dtype=torch.uint8,
    )
    with torch.no_grad():
        labels = bases()[0](pixels.float() / 255).argmax(1)
    return Dataset(
        "random", "test", pixels, labels, torch.arange(start, start + count), tuple("abcd")
    )


@pytest.fixture(autouse=True)
def little_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """No report, few ranges of gates, and one step against candidates."""
    monkeypatch.setattr("equipoise.reporting.report", lambda folder: Path(folder) / "report.html")
    monkeypatch.setattr(
        "equipoise.studies.shared_pool.candidate_attack", lambda model: Apgd(loss="margin", steps=1)
    )
    monkeypatch.setattr(
        "equipoise.studies.selector.full_attack", lambda model: Apgd(loss="margin", steps=2)
    )
    module = sys.modules["equipoise.studies.rule_comparison"]
    monkeypatch.setattr(
        module, "with_ranges", lambda model: gated.with_ranges(model, (0.0, 0.5, 0.9), (0.4,))
    )


def test_every_rule_of_a_fit_is_compared_under_its_agreed_name() -> None:
    (rule,) = (field for field in dataclasses.fields(FitSettings) if field.name == "rule")
    fitted = {"plain", *rule.metadata["among"]}
    assert fitted == {"auto", *RULES} - {"robust"}
    assert set(COMPARED) == fitted
    assert (RULES["paper"], RULES["nuts"], RULES["switch"]) == (
        "MixedNUTS",
        "NUTS map (ours)",
        "confidence switch",
    )
    assert ComparisonSettings().listed("rules") == [
        rule for rule in COMPARED if rule != "cascade"
    ]  # needs views


def test_progress_never_goes_back(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not from one rule to the next, nor where a mixture is selected instead of fitted."""
    monkeypatch.setattr(progress_display, "_SECONDS_BETWEEN_LINES", 0.0)
    with progress.display():
        eq.compare_rules(
            *bases(), images(), images(12, 500), rules="plain,paper,nuts,switch", **QUICK
        )
    fitting = [
        line for line in capsys.readouterr().err.splitlines() if line.startswith("[1/2 fitting]")
    ]
    shares = [int(line.partition("; ")[2].partition(" %")[0]) for line in fitting]
    assert shares == sorted(shares) and len(set(shares)) >= 4, fitting


def test_equal_mixtures_are_attacked_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measured = []
    measure = evaluation.measure

    def counted_measure(job: Any, data: Dataset, *arguments: Any, **more: Any) -> Any:
        measured.append((job.name, job.attack_name))
        return measure(job, data, *arguments, **more)

    monkeypatch.setattr(attack_list, "measure", counted_measure)
    result = eq.compare_rules(*bases(), images(), images(12, 500), rules="switch,auto", **QUICK)
    assert len(measured) == len(set(measured))
    methods = {method.name: method for method in result.summary.compared}
    assert list(methods) == ["accurate", "robust", "confidence switch", "auto (confidence switch)"]
    assert methods["auto (confidence switch)"].measured_as == "confidence switch"
    assert {name for name, _ in measured} == {"accurate", "robust", "confidence switch"}
    assert methods["confidence switch"].mixture.startswith("switch, gelu-monotone, unit ")
    assert "confidence switch" in str(result) and result.out is None
    (check,) = result.summary.promises
    assert (check.model, check.versus, check.promised.share) == ("confidence switch", "robust", 0.1)
    assert f"confidence switch: {check.explanation}" in str(result)


def test_a_cascade_is_compared_with_the_switch_over_all_views() -> None:
    accurate, robust = bases()
    pair = accurate, models.TTAClassifier(robust, 2)
    result = eq.compare_rules(*pair, images(), images(12, 500), rules="switch,cascade", **QUICK)
    methods = {method.name: method for method in result.summary.compared}
    assert list(methods) == ["accurate", "robust", "confidence switch", "cascade of views"]
    assert ", first view s " in methods["cascade of views"].mixture
    assert methods["confidence switch"].views == 2 and methods["accurate"].views is None
    assert methods["confidence switch"].description.endswith(", 2 views")
    views = methods["cascade of views"].views
    assert views is not None and 1 <= views <= 2
    measured = {row.model for row in result.rows}
    assert measured == {"accurate", "robust", "confidence switch", "cascade of views"}
    assert {check.model for check in result.summary.promises} == {
        "confidence switch",
        "cascade of views",
    }
    with pytest.raises(
        eq.InputError,
        match="`robust` must have views, such as tta:6:REFERENCE, for the rule cascade",
    ):
        eq.compare_rules(accurate, robust, images(), images(12, 500), rules="cascade", **QUICK)


def test_the_passes_of_a_cascade_are_limited() -> None:
    accurate, robust = bases()
    pair = accurate, models.TTAClassifier(robust, 2)
    views = []
    for passes in (2, 1.5, 1.05):
        result = eq.compare_rules(
            *pair,
            images(),
            images(12, 500),
            rules="cascade",
            passes=passes,
            **{**QUICK, "lose_at_most": 30},
        )
        views.append(result.summary.compared[-1].views or 0.0)
    assert 2 > views[0] > views[1] > views[2] >= 1


def saved_pair(folder: Path) -> tuple[list[str], Dataset]:
    """References of two saved networks, and random images with the classes of the first."""
    references = []
    for side, seed in (("accurate", 5), ("robust", 6)):
        network = models.build("cnn_small", num_classes=4, image_shape=(3, 8, 8), seed=seed).eval()
        checkpoint.save(folder / f"{side}.safetensors", network)
        references.append(str(folder / f"{side}.safetensors"))
    pixels = torch.randint(
        0, 256, (80, 3, 8, 8), generator=torch.Generator().manual_seed(1), dtype=torch.uint8
    )
    with torch.no_grad():
        labels = load_model(references[0])(pixels.float() / 255).argmax(1)
    return references, Dataset("random", "test", pixels, labels, torch.arange(80), tuple("abcd"))


def test_a_comparison_is_extended_by_a_cascade(tmp_path: Path) -> None:
    (accurate, robust), data = saved_pair(tmp_path)
    views = f"tta:2:{robust}"
    with torch.no_grad():
        data = replace(data, labels=load_model(views)(data.images.float() / 255).argmax(1))
    run = partial(
        eq.compare_rules,
        accurate,
        views,
        data.slice(0, 60),
        data.slice(60, 10),
        out=tmp_path / "C",
        report=False,
        **{**QUICK, "threat": eq.Threat("linf", 0.001), "lose_at_most": 60},
    )
    switch = run(rules="switch")
    both = run(rules="switch,cascade", passes=1.5)
    assert [method.name for method in both.summary.compared[2:]] == [
        "confidence switch",
        "cascade of views",
    ]
    assert run(rules="switch").results == switch.results
    with pytest.raises(eq.InputError, match="belong to this run"):
        run(rules="switch,cascade", passes=1.2)


def test_a_comparison_is_resumed_and_extended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, (references, data) = tmp_path / "C", saved_pair(tmp_path)
    arguments = {**QUICK, "threat": eq.Threat("linf", 0.001), "lose_at_most": 60}
    pair: tuple[Any, ...] = (*references, data.slice(0, 60), data.slice(60, 10))
    first = eq.compare_rules(*pair, out=folder, rules="plain", **arguments)
    rows = (folder / "rows.jsonl").read_bytes()
    assert eq.compare_rules(*pair, out=folder, rules="plain", **arguments).results == first.results
    assert (folder / "rows.jsonl").read_bytes() == rows
    shutil.rmtree(folder / "attacks" / "plain-mixing")
    (folder / "summary.json").unlink()
    assert eq.compare_rules(*pair, out=folder, rules="plain", **arguments).results == first.results
    with pytest.raises(eq.InputError, match="belong to this run"):
        eq.compare_rules(*pair, out=folder, rules="plain", **{**arguments, "lose_at_most": 50})
    with monkeypatch.context() as later, pytest.raises(eq.InputError, match="adaptive_attacks"):
        later.setattr("equipoise.studies.rule_comparison.ADAPTIVE_VERSION", 0)
        eq.compare_rules(*pair, out=folder, rules="plain", **arguments)
    example = data.images[:2].float() / 255
    bases = [load_model(model) for model in references]
    for seed in (0, 1):
        (tmp_path / f"seed-{seed}").mkdir()
        gate = new_gate(bases[0], bases[1], example, width=2, seed=seed)
        save_gate(tmp_path / f"seed-{seed}" / "gate.safetensors", gate, bases[0], bases[1])
    gates = [tmp_path / "seed-0", tmp_path / "seed-1" / "gate.safetensors"]
    one = eq.compare_rules(
        *pair, out=folder, rules="plain", over="plain", gates=gates[:1], **arguments
    )
    assert [method.name for method in one.summary.compared][2:] == ["plain mixing", "gate (seed-0)"]
    selected = folder / "mixtures" / "gate-seed-0" / "selection.json"
    written = selected.stat().st_mtime_ns
    more = eq.compare_rules(
        *pair,
        out=folder,
        rules="plain",
        over="plain",
        gates=gates,
        export=tmp_path / "X",
        **arguments,
    )
    assert [method.name for method in more.summary.compared] == [
        "accurate",
        "robust",
        "plain mixing",
        "gate (seed-0)",
        "gate (seed-1)",
    ]
    assert more.result("plain mixing", "worst") == first.result("plain mixing", "worst")
    assert {row for row in one.rows if row.model == "gate (seed-0)"} <= set(more.rows)
    assert selected.stat().st_mtime_ns == written  # only the second gate was computed
    assert "mean of 2" in str(more) and "gate, mean of 2" in more.markdown()
    assert isinstance(load_model(folder / "mixtures" / "gate-seed-0"), GatedClassifier)
    assert read_summary(folder).compared == more.summary.compared
    again = comparison_table.read_export(tmp_path / "X")
    assert comparison_table.markdown(again) == more.markdown()
    monkeypatch.setattr(sys, "argv", ["mixtures_table.py", str(tmp_path / "X")])
    runpy.run_path(str(ROOT / "benchmarks" / "mixtures_table.py"), run_name="__main__")
    assert capsys.readouterr().out.strip() == more.markdown()


def test_gates_are_named_by_what_they_are_over_and_by_their_training(tmp_path: Path) -> None:
    """The robust model is right where it is confident, the accurate one elsewhere."""
    accurate, robust = (
        models.build("cnn_small", num_classes=4, image_shape=(3, 8, 8), seed=seed).eval()
        for seed in (5, 6)
    )
    pixels = torch.randint(
        0, 256, (90, 3, 8, 8), generator=torch.Generator().manual_seed(1), dtype=torch.uint8
    )
    with torch.no_grad():
        g, h = accurate(pixels.float() / 255), robust(pixels.float() / 255)
    margin = h.topk(2).values.diff().squeeze(1).neg()
    labels = torch.where(margin > margin.median(), h.argmax(1), g.argmax(1))
    data = Dataset("random", "test", pixels, labels, torch.arange(90), tuple("abcd"))
    path = tmp_path / "one.safetensors"
    save_gate(
        path,
        new_gate(accurate, robust, pixels[:2].float() / 255, width=2, seed=0),
        accurate,
        robust,
    )
    result = eq.compare_rules(
        accurate,
        robust,
        data.slice(0, 80),
        data.slice(80, 10),
        rules="switch",
        over="switch",
        gates=[path],
        **{**QUICK, "threat": eq.Threat("linf", 1e-5)},
    )
    over = GatedClassifier(
        accurate, robust, load_gate(path, accurate, robust), logit_map=confidence_switch()
    )
    (compared,) = (method for method in result.summary.compared if "gate" in method.name)
    assert (compared.name, compared.family) == (f"{over.method} (one)", over.method)
    assert compared.mixture.startswith("switch, ") and over.method.endswith("confidence switch")


def test_images_that_are_fitted_on_are_refused() -> None:
    with pytest.raises(
        eq.InputError, match="be other images than those that are fitted on, got '70-79'"
    ):
        eq.compare_rules(*bases(), images(), images().take(torch.arange(70, 80)), **QUICK)


def test_copies_of_fitting_images_are_left_out_with_a_warning() -> None:
    fitted, others = images(), images(12, 500)
    pixels = others.images.clone()
    pixels[[3, 7]] = fitted.images[[0, 5]]
    with pytest.warns(
        EquipoiseWarning, match="images 503, 507 are copies of images that are fitted on"
    ):
        left, (note,) = without_fitting_images(replace(others, images=pixels), fitted)
    assert left.index.tolist() == [index for index in range(500, 512) if index not in (503, 507)]
    assert note == "images 503, 507 are copies of images that are fitted on, and were left out"
    assert without_fitting_images(others, fitted) == (others, ())
    with pytest.raises(
        eq.InputError, match="be other images than those that are fitted on, got '500-501'"
    ):
        without_fitting_images(replace(others.slice(0, 2), images=fitted.images[:2]), fitted)


def test_class_shares_of_both_image_sets_are_noted() -> None:
    even = (1000, 1000, 1000, 1000)
    one_class = [
        replace(part, labels=torch.zeros_like(part.labels), split_counts=even)
        for part in (images(12, 500), images())
    ]
    notes = without_fitting_images(*one_class)[1]
    assert [note[:32] for note in notes] == [
        "the class shares of these 12 ima",
        "fitting images: the class shares",
    ]


def test_promises_in_both_senses() -> None:
    settings = ComparisonSettings(promise="probability", confidence=0.9)
    assert settings.fit_settings("switch").target().confidence == 0.9
    assert settings.fit_settings("paper").target().confidence is None
    with pytest.raises(
        eq.InputError, match="`promise` must be left out where none of nuts, switch, auto and casc"
    ):
        ComparisonSettings(rules="plain,paper", promise="probability")
    with pytest.raises(
        eq.InputError, match="`confidence` must be left out unless `promise` is probability"
    ):
        ComparisonSettings(confidence=0.9)


def test_mixtures_are_measured_as_others_only_if_they_are_equal() -> None:
    """A map keeps a mixture with alpha 1 apart from the robust model: it changes the
    probabilities."""
    accurate, robust = bases()
    mapped = [
        eq.MixedClassifier(accurate, robust, 1.0, logit_map=LogitMap(2.0, 1.0, 0.0, "linear"))
        for _ in range(2)
    ]
    alone = eq.MixedClassifier(accurate, robust, 1.0)
    assert measured_as({"a": alone, "b": mapped[0], "c": mapped[1]}) == {
        "a": "robust",
        "b": "b",
        "c": "b",
    }


def test_the_table_tells_a_switch_from_a_map_of_the_paper() -> None:
    maps = {
        "switch, linear, unit 3, s 5.55, p 1, c 0, alpha 0.7": LogitMap(
            5.551, 1, 0, "linear", rivals=0, unit=3.0
        ),
        "linear, rivals 0.5, s 5.55, p 1, c 0, alpha 0.7": LogitMap(
            5.551, 1, 0, "linear", rivals=0.5
        ),
        "gelu, s 2, p 3, c -0.1, alpha 0.7": LogitMap(2, 3, -0.1, "gelu"),
        "alpha 0.7": None,
    }
    for text, logit_map in maps.items():
        assert describe(eq.MixedClassifier(*bases(), 0.7, logit_map=logit_map)) == text


def test_gates_have_different_names(tmp_path: Path) -> None:
    for name in ("a/gate.safetensors", "b/gate.safetensors", "a.safetensors"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    assert list(name_gates([tmp_path / "a", tmp_path / "b" / "gate.safetensors"])) == ["a", "b"]
    with pytest.raises(eq.InputError, match="`gates` must have different names, got 'a'"):
        name_gates([tmp_path / "a", tmp_path / "a.safetensors"])
    with pytest.raises(eq.InputError, match="`gate` must be a file or folder that exists"):
        name_gates([tmp_path / "c"])


def test_the_worst_case_over_a_list_needs_no_second_attack_on_broken_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both orders of the list agree with evaluating every attack on every image; adaptive attacks
    come first."""
    mixture, threat, data = (
        eq.MixedClassifier(*bases(), 0.6, hard=True),
        eq.Threat("linf", 0.02),
        images(24, 500),
    )
    options: dict[str, Any] = {
        "source": "mix",
        "adaptive": ["surrogate", "own-gradients"],
        "stand_in": None,
    }
    whole = eq.evaluate(
        mixture,
        data,
        threat=threat,
        attack=[Pgd(steps=2), Apgd(steps=2)],
        device="cpu",
        adaptive="surrogate,own-gradients",
    )
    measured: list[tuple[str, int]] = []

    def counted(job: Job, left: Dataset, *arguments: Any) -> Any:
        measured.append((job.attack_name, len(left)))
        return evaluation.measure(job, left, *arguments)

    monkeypatch.setattr(attack_list, "measure", counted)
    conditions = Conditions(threat, torch.device("cpu"), 0, 128, "fp32")
    for names in (["pgd", "apgd"], ["apgd", "pgd"]):
        attacks = select_attacks(",".join(names), "linf", steps=2)
        plan = EvaluationPlan(
            {"mixed": mixture},
            data,
            attacks,
            norm="linf",
            audit=0,
            device=conditions.device,
            shared_bases=True,
            **options,
        )
        for model, adaptive in {
            "robust": [],
            "mixed": [f"adaptive-{name}" for name in names],
        }.items():
            measured.clear()
            jobs = [job for job in plan.jobs if job.name == model]
            rows = attack_list.measure_list(jobs, data, tmp_path / names[0] / model, conditions)
            assert [name for name, _ in measured] == ["clean", *adaptive, *names]
            assert 0 < measured[-1][1] < 24  # the last attack gets survivors only
            survivors = sum(row.correct for row in rows if row.attack == attack_list.ATTACKED)
            assert survivors / 24 == pytest.approx(whole.result(model, "worst").value)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"rules": "nuts,nut"}, "`rules` must be"),
        ({"over": "auto"}, "`over` must be"),
        ({"beta": 0.9}, "`target` must be at most one"),
        ({"candidates": 0}, "`candidates` must be"),
        ({"passes": 3}, "`passes` must be left out where cascade is not compared, got 3"),
        ({"rules": "cascade", "passes": 0.5}, "`passes` must be at least 1, got 0.5"),
    ],
)
def test_wrong_settings(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(eq.InputError, match=sentence):
        eq.compare_rules(*bases(), images(), images(12, 500), **{**QUICK, **settings})
