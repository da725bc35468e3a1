"""The order of the page. A new section is one function and one line here."""

from __future__ import annotations

from collections.abc import Callable

from equipoise.reporting.alpha import accuracy_against_alpha
from equipoise.reporting.certified import certified
from equipoise.reporting.estimates import estimates
from equipoise.reporting.examples import examples
from equipoise.reporting.frontier import frontier
from equipoise.reporting.gate import ablation, aimed_alphas, alphas, perfect_gate, settings
from equipoise.reporting.gate_trade_off import gate_trade_off
from equipoise.reporting.headline import headline
from equipoise.reporting.local_policy import auto, crossing, gradients, radii, targets
from equipoise.reporting.local_smoothing import fixed, neighbours, trust
from equipoise.reporting.margins import margins
from equipoise.reporting.mixture_fit import cost, landscape, mapped_margins, promise, trade_off
from equipoise.reporting.provenance import provenance
from equipoise.reporting.sanity_checks import symptoms
from equipoise.reporting.section import Section
from equipoise.reporting.training import training
from equipoise.reporting.view import RunView

SECTIONS: list[Callable[[RunView], Section | None]] = [
    headline,
    auto,
    symptoms,
    training,
    certified,
    frontier,
    promise,
    trade_off,
    accuracy_against_alpha,
    trust,
    fixed,
    neighbours,
    crossing,
    targets,
    radii,
    gradients,
    perfect_gate,
    alphas,
    gate_trade_off,
    aimed_alphas,
    settings,
    ablation,
    examples,
    margins,
    estimates,
    mapped_margins,
    landscape,
    cost,
    provenance,
]
