"""Certificates: counts → bound → radius."""

from equipoise.certify.average import Averaged as Averaged
from equipoise.certify.certificate import ABSTAIN as ABSTAIN
from equipoise.certify.certificate import Certificate as Certificate
from equipoise.certify.certificate import joined as joined
from equipoise.certify.lipschitz import estimate_local as estimate_local
from equipoise.certify.lipschitz import lipschitz_radius as lipschitz_radius
from equipoise.certify.plan import Plan as Plan
from equipoise.certify.sampler import Engine as Engine
from equipoise.certify.smooth import certify as certify
from equipoise.certify.smooth import predict as predict
