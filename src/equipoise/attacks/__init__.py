"""Attacks: `attack(model, x, y, *, threat, stream, surrogate=None, extra=None) → x_adv`.

`model` decides success, `surrogate` gives gradients, `stream` is the chance of these images, `extra` adds a
term to the objective. :func:`worst_case` folds a list of attacks over a whole data set.
"""

from equipoise.attacks.apgd import Apgd as Apgd
from equipoise.attacks.apgd import apgd as apgd
from equipoise.attacks.auto import auto_attack as auto_attack
from equipoise.attacks.engine import SearchResult as SearchResult
from equipoise.attacks.fab import Fab as Fab
from equipoise.attacks.fab import fab as fab
from equipoise.attacks.minimum_margin import MarginPoints as MarginPoints
from equipoise.attacks.minimum_margin import minimum_margin as minimum_margin
from equipoise.attacks.outcome import AttackState as AttackState
from equipoise.attacks.pgd import pgd as pgd
from equipoise.attacks.pgd import transfer as transfer
from equipoise.attacks.registry import ATTACKS as ATTACKS
from equipoise.attacks.registry import named as named
from equipoise.attacks.sanity_checks import SanityCheck as SanityCheck
from equipoise.attacks.sanity_checks import black_box as black_box
from equipoise.attacks.sanity_checks import run_sanity_checks as run_sanity_checks
from equipoise.attacks.square import Square as Square
from equipoise.attacks.square import square as square
from equipoise.attacks.straight_through import straight_through as straight_through
from equipoise.attacks.suite import FunctionAttack as FunctionAttack
from equipoise.attacks.targeted import Targeted as Targeted
from equipoise.attacks.targeted import targeted as targeted
from equipoise.attacks.worst_case import Stage as Stage
from equipoise.attacks.worst_case import Suite as Suite
from equipoise.attacks.worst_case import worst_case as worst_case
