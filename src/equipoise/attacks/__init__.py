"""Attacks: an :class:`Attack` is an algorithm with its settings, and a :class:`Suite` of attacks is
an attack.

`attack(model, x, y, threat=…, stream=…)` attacks one batch, :func:`attack_dataset` a whole data
set.
"""

from equipoise.attacks.adapters import from_callable as from_callable
from equipoise.attacks.adapters import from_foolbox as from_foolbox
from equipoise.attacks.adapters import from_torchattacks as from_torchattacks
from equipoise.attacks.apgd import Apgd as Apgd
from equipoise.attacks.attack_state import AttackState as AttackState
from equipoise.attacks.batch_attacks import BatchAttack as BatchAttack
from equipoise.attacks.batch_attacks import Clean as Clean
from equipoise.attacks.batch_attacks import FunctionAttack as FunctionAttack
from equipoise.attacks.cached import cached as cached
from equipoise.attacks.fab import Fab as Fab
from equipoise.attacks.minimum_margin import margin_suite as margin_suite
from equipoise.attacks.minimum_margin import minimum_margin as minimum_margin
from equipoise.attacks.minimum_norm import MinimumNorm as MinimumNorm
from equipoise.attacks.minimum_norm import radii_of as radii_of
from equipoise.attacks.pgd import Pgd as Pgd
from equipoise.attacks.pgd import TransferPgd as TransferPgd
from equipoise.attacks.randomized import EOT as EOT
from equipoise.attacks.randomized import MAX_PASSES as MAX_PASSES
from equipoise.attacks.randomized import REPEATS as REPEATS
from equipoise.attacks.randomized import judge_with_new_passes as judge_with_new_passes
from equipoise.attacks.registry import ATTACKS as ATTACKS
from equipoise.attacks.registry import fast as fast
from equipoise.attacks.registry import make_attack as make_attack
from equipoise.attacks.registry import rand as rand
from equipoise.attacks.registry import standard as standard
from equipoise.attacks.sanity_checks import black_box_check as black_box_check
from equipoise.attacks.sanity_checks import run_sanity_checks as run_sanity_checks
from equipoise.attacks.search_state import SearchResult as SearchResult
from equipoise.attacks.square import Square as Square
from equipoise.attacks.straight_through import straight_through as straight_through
from equipoise.attacks.suite import Attack as Attack
from equipoise.attacks.suite import Suite as Suite
from equipoise.attacks.suite import attack_dataset as attack_dataset
from equipoise.attacks.targeted import TargetedApgd as TargetedApgd
