"""The order of the page. A new section is one function and one line here."""

from __future__ import annotations

from collections.abc import Callable

from equipoise.report.alpha import accuracy_against_alpha
from equipoise.report.certified import certified
from equipoise.report.estimates import estimates
from equipoise.report.examples import examples
from equipoise.report.frontier import frontier
from equipoise.report.gate import ablation, aimed_alphas, alphas, perfect_gate, settings
from equipoise.report.gate_trade_off import gate_trade_off
from equipoise.report.headline import headline
from equipoise.report.local_policy import auto, crossing, gradients, radii, targets
from equipoise.report.local_smoothing import fixed, neighbours, trust
from equipoise.report.margins import margins
from equipoise.report.nuts import cost, landscape, mapped_margins, promise, trade_off
from equipoise.report.provenance import provenance
from equipoise.report.section import Section
from equipoise.report.symptoms import symptoms
from equipoise.report.training import training
from equipoise.report.view import RunView

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
