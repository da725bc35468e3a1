"""Fitting: from attacks and cached logits to a mixture with a promise."""

from equipoise.fitting.conformal import Target as Target
from equipoise.fitting.fitter import fit as fit
from equipoise.fitting.result import Fit as Fit
from equipoise.fitting.settings import FitSettings as FitSettings
