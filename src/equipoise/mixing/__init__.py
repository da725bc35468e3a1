"""Two classifiers become one."""

from equipoise.mixing.classifier import MixedClassifier as MixedClassifier
from equipoise.mixing.folder import load as load
from equipoise.mixing.folder import save as save
from equipoise.mixing.rules import gate_of as gate_of
from equipoise.mixing.rules import mix as mix
