"""Certificates by randomized smoothing: votes of noisy copies → confidence bound → radius.

`randomized_smoothing` holds CERTIFY and PREDICT, `certificate` the settings and the result,
`sampler` the noisy forward passes; `radii` is the arithmetic, `sequential` stops early, `soft`
certifies mean probabilities, `mixture` and `lipschitz` extend certificates to mixtures,
`diagnostics` are estimates.

To add a certificate, write a function `(sampler: Sampler, plan: SmoothingPlan) -> Certificate` and
register it: in this package in `randomized_smoothing.CERTIFICATES`, from another one as an entry
point of the group `equipoise.certificates`. `SmoothingPlan(certificate=NAME)` and `equipoise
certify --certificate NAME` then use it. The function draws with `sampler.votes` (or
`sampler.accumulate`, for logits): with the purpose "select" the samples that select a class, with
"estimate" fresh ones that bound its probability. It returns `Certificate.of(...)`, which abstains
where the radius is zero.
"""

from equipoise.certification.certificate import ABSTAIN as ABSTAIN
from equipoise.certification.certificate import Certificate as Certificate
from equipoise.certification.certificate import SamplingSettings as SamplingSettings
from equipoise.certification.certificate import SmoothingPlan as SmoothingPlan
from equipoise.certification.diagnostics import AveragedClassifier as AveragedClassifier
from equipoise.certification.lipschitz import estimate_local as estimate_local
from equipoise.certification.lipschitz import lipschitz_radius as lipschitz_radius
from equipoise.certification.randomized_smoothing import CERTIFICATES as CERTIFICATES
from equipoise.certification.randomized_smoothing import certify as certify
from equipoise.certification.randomized_smoothing import predict as predict
from equipoise.certification.randomized_smoothing import (
    predict_from_certificate as predict_from_certificate,
)
from equipoise.certification.sampler import Sampler as Sampler
from equipoise.certification.sampler import SamplerOptions as SamplerOptions
