"""The rules of one pair, and what attacks on them follow."""

from __future__ import annotations

import math

import pytest
import torch

from equipoise import data, models
from equipoise.core import rng
from equipoise.core.threat import Threat
from equipoise.evaluation import Conditions
from equipoise.local_smoothing.smoothing import SmoothedClassifier
from equipoise.studies.local_pair import Pair
from equipoise.studies.local_rules import Bfloat16Copy, RuleSet
from equipoise.studies.local_size import LocalStudySize

THREAT = Threat("linf", 0.1)


def _pair() -> Pair:
    test = data.load("digits", split="test", count=12)
    g, h = (models.build("cnn_small", num_classes=10, image_shape=(1, 8, 8), seed=seed).eval() for seed in (1, 2))
    return Pair(g, h, ("zoo:cnn_small", "zoo:cnn_small"), test.slice(6, 6), test.slice(0, 6), lambda: test, 6)


def _rules() -> RuleSet:
    return RuleSet(_pair(), LocalStudySize(steps=2), Conditions(THREAT, torch.device("cpu"), 0, 6))


def test_every_rule_meets_the_same_transferred_images() -> None:
    images = []
    for gamma in (0.1, 10.0):  # two judges, who miss other images
        rules = _rules()
        x, y = rules.few(rules.pair.test), rules.pair.test.labels
        judge = rules.rule(rules.pair.robust, gamma, "constant")
        images.append(rules.on_accurate(judge, x, y, threat=THREAT, stream=rng.stream(0, "any", torch.arange(6))))
        assert bool((images[-1] != x).flatten(1).any(dim=1).all()), "every image is attacked, right or wrong"
    assert torch.equal(images[0], images[1])


def test_a_rule_with_a_steepness_is_attacked_softly_too() -> None:
    rules = _rules()
    assert set(rules.through(rules.pair.robust, 1.0, "constant")) == {"pgd"}
    assert set(rules.through(rules.pair.robust, 1.0, "ratio")) == {"pgd", "pgd-soft"}
    assert set(rules.through(rules.pair.robust, math.inf, "ratio")) == {"pgd"}


def test_the_scale_is_the_median_of_trust_on_held_out_images() -> None:
    rules = _rules()
    assert rules.scale("constant", "logits") == 1.0
    rule = SmoothedClassifier(rules.pair.accurate, rules.pair.robust, 1.0, trust="top-gradient")
    wanted = rule.parts(rules.few(rules.pair.held_out))[2].detach().median()
    assert rules.scale("top-gradient", "logits") == pytest.approx(wanted.item())


def test_copies_for_gradients_have_no_batch_norm_left_and_touch_no_model() -> None:
    x = torch.rand(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    model = models.build("resnet8", num_classes=10, image_shape=(1, 8, 8), seed=1).eval()
    flat = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10)).eval()
    for base in (model, flat):
        before = base(x)
        copy = Bfloat16Copy(base, x)
        assert not any(isinstance(sub, torch.nn.BatchNorm2d) for sub in copy.modules())
        # Weights in bfloat16, passes in float32: some CPUs trap on the former.
        found = copy.model.float()(x)
        torch.testing.assert_close(found, before, rtol=0, atol=0.05 * float(before.detach().abs().max()))
        assert torch.equal(base(x), before) and all(p.dtype == torch.float32 for p in base.parameters())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_gradients_of_copies_in_fewer_bits_point_the_same_way() -> None:
    pair, x = _pair(), torch.rand(4, 1, 8, 8, generator=torch.Generator().manual_seed(0)).cuda()
    ways = []
    bases = pair.accurate.cuda(), pair.robust.cuda()
    for g, h in (bases, (Bfloat16Copy(bases[0].eval(), x), Bfloat16Copy(bases[1].eval(), x))):
        rule = SmoothedClassifier(g.eval(), h.eval(), 1.0, trust="ratio", space="probabilities").cuda()
        point = x.clone().requires_grad_()
        ways.append(torch.autograd.grad(rule(point)[:, 0].sum(), point)[0].flatten(1))
    assert torch.nn.functional.cosine_similarity(ways[0], ways[1]).min() > 0.9
