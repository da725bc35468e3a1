from __future__ import annotations

import numpy as np
import pytest
import torch
from closed_form import Bins, images, random_stream
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.certification import ABSTAIN, SamplerOptions, SmoothingPlan, certify, radii
from equipoise.certification.differences import exceeds
from equipoise.certification.mixture import SmoothedBase, frontier, predict_from_votes, upper_bounds
from equipoise.core.checks import InputError
from equipoise.core.rows import CertificateRow
from equipoise.mixing import gate_of, mix


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 10**6), st.floats(0.5, 1.0), st.floats(0.1, 20))
def test_lemma_holds_for_any_accurate_classifier(seed: int, alpha: float, scale: float) -> None:
    drawn = torch.randn(50, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    h = torch.softmax(scale * drawn, dim=1)
    top = h.topk(2, dim=1).values
    kept = top[:, 0] - top[:, 1] >= radii.lemma_margin(alpha)
    for one_hot in torch.eye(6, dtype=torch.float64):
        g = one_hot.clamp(1e-300).expand_as(h)
        mixed = mix(g.log(), h.log(), gate_of(alpha).double())
        # At equality the two classes tie.
        own = mixed.gather(1, h.argmax(dim=1, keepdim=True)).squeeze(1)
        assert (own >= mixed.amax(dim=1) - 1e-7)[kept].all()


def test_lemma_is_tight() -> None:
    """The paper's example: with less margin, the accurate classifier that is certain of the
    runner-up wins."""
    alpha = 0.7
    for slip, wins in ((1e-6, False), (-1e-6, True)):
        top = (1 + radii.lemma_margin(alpha) - slip) / 2
        h = torch.tensor([[top, 1 - top]], dtype=torch.float64)
        g = torch.tensor([[1e-300, 1.0]], dtype=torch.float64)
        assert (mix(g.log(), h.log(), gate_of(alpha).double()).argmax(dim=1) == 0).item() is wins


def base() -> SmoothedBase:
    """Four images: g is correct on all, h on the first two; each step of alpha gives one more to
    g."""
    return SmoothedBase(
        0.5,
        top=np.array([0, 1, 1, 1]),
        lower=np.array([0.9, 0.9, 0.7, 0.6]),
        accurate=np.array([0, 1, 0, 0]),
        gap=np.array([0.0, 0.0, 0.5, 0.2]),
        labels=np.array([0, 1, 0, 0]),
    )


def test_largest_alpha_for_a_clean_accuracy() -> None:
    assert base().clean_accuracy(1.0) == 0.5 and base().largest_alpha(0.5) == 1.0
    alpha = base().largest_alpha(0.75)
    assert alpha == pytest.approx(1 / 1.2) and base().clean_accuracy(alpha) == 0.75
    assert base().clean_accuracy(base().largest_alpha(1.0)) == 1.0


def test_a_clean_accuracy_out_of_reach() -> None:
    wrong = SmoothedBase(
        0.5, base().top, base().lower, 1 - base().accurate, base().gap, base().labels
    )
    with pytest.raises(InputError, match="`clean` must be reachable"):
        wrong.largest_alpha(0.9)


def test_largest_alpha_for_a_gap_near_one() -> None:
    """Mean probabilities may have a gap next to 1; alpha stays in [0.5, 1]."""
    single = SmoothedBase(
        0.5, np.array([1]), np.array([0.9]), np.array([0]), np.array([1 - 1e-10]), np.array([0])
    )
    assert single.best_clean_accuracy() == 1 and single.largest_alpha(1.0) == 0.5


def test_frontier_is_the_best_of_all_mixtures() -> None:
    x = images(300)
    labels = (x.flatten() > 0.5).long()
    mixtures = []
    for sigma in (0.1, 0.3):
        certificate = certify(
            Bins((0.0, 1.0)),
            x,
            plan=SmoothingPlan(sigma, samples=2000),
            stream=random_stream(300),
            options=SamplerOptions(batch_size=1 << 15),
        )
        smoothed = SmoothedBase(
            sigma,
            certificate.top.numpy(),
            certificate.lower.numpy(),
            labels.numpy(),
            certificate.gap(labels).numpy(),
            labels.numpy(),
        )
        mixtures.append((smoothed, smoothed.largest_alpha(0.97)))
    at = np.linspace(0, 0.5, 11)
    best, which = frontier(mixtures, at)
    assert (np.diff(best) <= 0).all() and len(which) == 11 and set(which) == {0, 1}
    for smoothed, alpha in mixtures:
        assert smoothed.clean_accuracy(alpha) >= 0.97
        assert (best >= [(smoothed.radius(alpha) >= max(r, 1e-300)).mean() for r in at]).all()
        for theorem in ("A.2", "3.5"):
            assert (smoothed.radius(alpha) >= smoothed.radius(alpha, theorem) - 1e-9).all()


def test_the_prediction_of_a_mixture_is_the_class_that_wins() -> None:
    n = np.full(3, 1000.0)
    votes = np.array([[900.0, 50.0, 50.0], [550.0, 400.0, 50.0], [620.0, 300.0, 80.0]])
    top, accurate = np.zeros(3, dtype=np.int64), np.ones(3, dtype=np.int64)
    # (1 − .7)/.7 = .43: a margin of .85 holds, .15 and .32 are lost to g.
    assert predict_from_votes(votes, n, top, accurate, 0.7, 0.001).tolist() == [0, 1, 1]
    # At alpha = .75 the margin needed is .333, too near to .32 for a thousand votes.
    assert predict_from_votes(votes, n, top, accurate, 0.75, 0.001).tolist()[2] == ABSTAIN
    assert predict_from_votes(votes, n, top, top, 0.7, 0.001).tolist() == [0, 0, 0]


def test_a_third_class_is_tested_with_half_of_the_failure() -> None:
    """Against a third class the tests of both candidates could fail; where g and h agree there is
    one candidate."""
    n, failure = 1000.0, 0.05
    level = [np.array([share * failure]) for share in (1.0, 0.5)]
    own = next(
        own
        for own in range(300, 600)
        if exceeds(np.array([float(own)]), np.array([300.0]), np.array([n]), np.zeros(1), level[0])[
            0
        ]
    )
    votes = np.array([[own, 5.0, 300.0, *[(n - own - 305) / 4] * 4]])
    assert not exceeds(votes[:, 0], votes[:, 2], np.array([n]), np.zeros(1), level[1])[0]
    for accurate, predicted in ((0, 0), (1, ABSTAIN)):
        found = predict_from_votes(
            votes, np.array([n]), np.array([0]), np.array([accurate]), 1.0, failure
        )
        assert found.tolist() == [predicted]


def test_unanimous_votes_tie_at_alpha_one_half() -> None:
    """A tie of both classes is not counted for the robust one."""
    tied = SmoothedBase(
        0.5,
        top=np.array([1, 1, 1]),
        lower=np.array([0.9, 0.9, 0.9]),
        accurate=np.array([0, 1, 0]),
        gap=np.array([1.0, 0.0, 0.9]),
        labels=np.array([1, 1, 1]),
    )
    assert tied.correct(0.5).tolist() == [False, True, False]
    assert tied.correct(0.51).tolist() == [True, True, False] and tied.correct(1.0).all()


@pytest.mark.parametrize("uppers", [(0.1, None), (None, 0.1)])
def test_upper_bounds_only_where_all_rows_have_one(uppers: tuple[float | None, ...]) -> None:
    rows = [
        CertificateRow(
            index=i,
            model="m",
            attack="certify",
            label=0,
            predicted=0,
            correct=True,
            radius=0.1,
            lower=0.8,
            upper=upper,
            samples=10,
            top=0,
            answer=0,
            sigma=0.1,
        )
        for i, upper in enumerate(uppers)
    ]
    assert upper_bounds(rows) is None
