"""Attacks: `attack(model, x, y, *, threat, stream, surrogate=None, extra=None) → x_adv`."""

from equipoise.attacks.named import ATTACKS as ATTACKS
from equipoise.attacks.named import named as named
from equipoise.attacks.pgd import pgd as pgd
