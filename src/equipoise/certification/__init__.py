"""Certificates: counts → bound → radius."""

from equipoise.certification.average import Averaged as Averaged
from equipoise.certification.certificate import ABSTAIN as ABSTAIN
from equipoise.certification.certificate import Certificate as Certificate
from equipoise.certification.certificate import joined as joined
from equipoise.certification.lipschitz import estimate_local as estimate_local
from equipoise.certification.lipschitz import lipschitz_radius as lipschitz_radius
from equipoise.certification.plan import SmoothingPlan as SmoothingPlan
from equipoise.certification.sampler import Engine as Engine
from equipoise.certification.smooth import certify as certify
from equipoise.certification.smooth import predict as predict
