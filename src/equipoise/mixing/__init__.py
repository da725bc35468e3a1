"""Two classifiers become one."""

from equipoise.mixing.classifier import HardLabels as HardLabels
from equipoise.mixing.classifier import MixedClassifier as MixedClassifier
from equipoise.mixing.folder import load as load
from equipoise.mixing.folder import save as save
from equipoise.mixing.frontier import Frontier as Frontier
from equipoise.mixing.frontier import Point as Point
from equipoise.mixing.gate import Gate as Gate
from equipoise.mixing.gate import new_gate as new_gate
from equipoise.mixing.gated import GatedClassifier as GatedClassifier
from equipoise.mixing.logit_maps import LogitMap as LogitMap
from equipoise.mixing.provenance import Provenance as Provenance
from equipoise.mixing.rules import gate_of as gate_of
from equipoise.mixing.rules import mix as mix
