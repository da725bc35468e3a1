"""Attacks on models without gradients, such as a server's: by random search, which results and
reports say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from equipoise.attacks import Attack, Clean, Square
from equipoise.evaluation.job import Job
from equipoise.models import has_gradients

NAME, QUERIES = "square", 5000


def to_random_search(attacks: Mapping[str, Attack]) -> dict[str, Attack]:
    """The random search among these attacks, else one of :data:`QUERIES` in place of all of
    them."""
    given: dict[str, Attack] = {
        name: attack for name, attack in attacks.items() if isinstance(attack, Square)
    }
    return given or {NAME: Square(QUERIES)}


def is_random_search(job: Job) -> bool:
    """Whether a job searches at random because gradients of its model, or of one side of it, are
    missing."""
    return (
        isinstance(job.attack, Square)
        and job.attack.surrogate is None
        and not has_gradients(job.model)
    )


def random_search_notes(jobs: Sequence[Job]) -> tuple[str, ...]:
    """One sentence for every model that was attacked by random search because it has no gradients,
    or only some."""
    searched = {
        job.name: job.attack.queries
        for job in jobs
        if is_random_search(job) and isinstance(job.attack, Square)
    }
    by_gradients = {job.name for job in jobs if not isinstance(job.attack, Clean | Square)}
    return tuple(
        f"the accurate side of {name} has no gradients: attacks had those of its robust side alone, and a random "
        f"search was added (Square, {queries} queries); attacks with all gradients could break more images"
        if name in by_gradients
        else f"{name} has no gradients and was attacked by random search alone (Square, {queries} queries): "
        "attacks with gradients could break more images"
        for name, queries in searched.items()
    )
