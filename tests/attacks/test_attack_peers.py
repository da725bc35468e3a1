"""Comparison with other libraries, on a robust network and real images."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from equipoise import attacks, data, models
from equipoise.attacks import Apgd, Fab, Square, Suite, TargetedApgd
from equipoise.attacks.apgd import (
    apgd_maximize,
    checkpoint_intervals,
    observe,
    start_ascent,
    take_step,
)
from equipoise.core import geometry, losses
from equipoise.core.ascent import value_and_gradient
from equipoise.core.rng import Stream, stream
from equipoise.core.threat import NORMS, Threat

pytestmark = [pytest.mark.reference, pytest.mark.filterwarnings("ignore")]
NAMES = {"linf": "Linf", "l2": "L2", "l1": "L1"}
EPS = {"linf": 8 / 255, "l2": 0.5, "l1": 12.0}
COUNT = 24


@pytest.fixture
def network(real_weights: Path) -> nn.Module:
    return (
        models.load(f"file:{real_weights / 'cifar10_resnet8_pgd_at_linf8.safetensors'}")
        .eval()
        .requires_grad_(False)
    )


@pytest.fixture
def images(real_data: Path, network: nn.Module) -> tuple[Tensor, Tensor, Stream]:
    """Images that the network classifies correctly."""
    loaded = data.load_data("cifar10", data_dir=real_data, count=48)
    x, y = data.pixels(loaded.images), loaded.labels
    correct = (network(x).argmax(dim=1) == y).nonzero().squeeze(1)[:COUNT]
    return x[correct], y[correct], stream(0, "peers", loaded.index[correct])


def _broken(network: nn.Module, x_adv: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        broken: Tensor = network(x_adv).argmax(dim=1) != y
    return broken


@pytest.mark.parametrize("loss", ["ce", "dlr"])
@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_apgd_reaches_the_same_loss(
    network: nn.Module, images: tuple[Tensor, Tensor, Stream], norm: str, loss: str
) -> None:
    """From the same start, in double precision, every image ends with the same best loss."""
    apgd = pytest.importorskip("pyautoattack.autopgd_base")
    x, y = images[0][:8].double(), images[1][:8]
    network.double()
    threat = Threat(norm, EPS[norm])
    start = geometry.surface(x, threat, stream(1, "start", torch.arange(8)))
    peer = apgd.APGDAttack(
        network, n_iter=40, norm=NAMES[norm], eps=threat.eps, loss=loss, device="cpu"
    )
    peer.init_hyperparam(x)
    _, _, expected, _ = peer.attack_single_run(x, y, x_init=start)

    evaluate = value_and_gradient(lambda z: losses.LOSSES[loss](network(z), y))
    state, intervals = (
        start_ascent(start, x.new_full((8,), threat.eps)),
        torch.tensor(checkpoint_intervals(40)),
    )
    for step in range(41):
        value, gradient = evaluate(state.point)
        state = observe(state, value, gradient)
        if (
            step == 0
        ):  # the peer compares the first step with an empty slot of its table instead of with the start
            state = replace(state, last_value=torch.zeros_like(state.last_value))
        state = take_step(
            state,
            gradient,
            norm=norm,
            project=partial(geometry.project, x=x, threat=threat),
            intervals=intervals,
        )
    # The peer keeps its losses in single precision, so a decision between equal losses may differ.
    close = (state.best_value - expected).abs() <= 2e-3 * expected.abs().clamp_min(1)
    assert int(close.sum()) >= 7


@pytest.mark.parametrize("loss", ["ce", "dlr"])
def test_apgd_reaches_the_same_loss_in_l1(
    network: nn.Module, images: tuple[Tensor, Tensor, Stream], loss: str
) -> None:
    """From the same start. The peer counts pixels that rounding has changed, so losses agree on
    average only."""
    apgd = pytest.importorskip("pyautoattack.autopgd_base")
    x, y = images[0][:8], images[1][:8]
    start = geometry.surface(x, Threat("l1", 12), stream(1, "start", torch.arange(8)))
    peer = apgd.APGDAttack(network, n_iter=40, norm="L1", eps=12.0, loss=loss, device="cpu")
    peer.init_hyperparam(x)
    _, _, expected, _ = peer.attack_single_run(x, y, x_init=start)
    reached = value_and_gradient(lambda z: losses.LOSSES[loss](network(z), y))
    best, _ = reached(
        apgd_maximize(reached, x, start, norm="l1", eps=torch.full((8,), 12.0), steps=40)
    )
    torch.testing.assert_close(best.mean(), expected.mean(), rtol=0.03, atol=0.01)


def test_suite_has_the_verdict_of_autoattack_in_l1(
    network: nn.Module, images: tuple[Tensor, Tensor, Stream]
) -> None:
    """APGD-CE from one start and three targets, with radii of 3, 2 and 1 eps: the same images
    survive, up to one."""
    pyautoattack = pytest.importorskip("pyautoattack")
    x, y, numbers = images[0][:16], images[1][:16], images[2][:16]
    peer = pyautoattack.AutoAttack(
        network,
        norm="L1",
        eps=12.0,
        version="custom",
        device="cpu",
        seed=0,
        attacks=["apgd-ce", "apgd-t"],
    )
    for part in (peer.apgd, peer.apgd_targeted):
        part.n_restarts, part.use_largereps, part.n_target_classes = 1, True, 3
    x_peer, _ = peer.run_standard_evaluation(x, y, batch_size=16)
    theirs = _broken(network, x_peer, y)
    ours = _broken(
        network,
        Suite((Apgd(), TargetedApgd(ranks=(1, 2, 3))))(
            network, x, y, threat=Threat("l1", 12), stream=numbers
        ),
        y,
    )
    assert bool(theirs.any()) and not bool(theirs.all())
    assert int((ours != theirs).sum()) <= 1


@pytest.mark.parametrize("norm", NORMS)
def test_fab_breaks_the_same_images(
    network: nn.Module, images: tuple[Tensor, Tensor, Stream], norm: str
) -> None:
    """FAB is not random: the same images are broken."""
    fab = pytest.importorskip("pyautoattack.fab_pt")
    x, y, numbers = images
    threat = Threat(norm, EPS[norm])
    peer = fab.FABAttack_PT(
        network,
        norm=NAMES[norm],
        n_iter=20,
        eps=threat.eps,
        targeted=True,
        n_target_classes=2,
        device="cpu",
    )
    theirs = _broken(network, peer.perturb(x, y), y)
    ours = _broken(network, Fab(20, (1, 2))(network, x, y, threat=threat, stream=numbers), y)
    assert bool(theirs.any()) and not bool(theirs.all())
    assert int((theirs != ours).sum()) <= 1


@pytest.mark.parametrize("norm", NORMS)
def test_square_is_as_strong(
    network: nn.Module, images: tuple[Tensor, Tensor, Stream], norm: str
) -> None:
    """With other random numbers perhaps other images; the mean margin is the same."""
    square = pytest.importorskip("pyautoattack.square")
    x, y, numbers = images
    threat = Threat(norm, EPS[norm])
    peer = square.SquareAttack(
        network,
        norm=NAMES[norm],
        n_queries=200,
        eps=threat.eps,
        p_init=0.8,
        device="cpu",
        resc_schedule=False,
        seed=0,
    )
    peer.init_hyperparam(x)
    torch.manual_seed(0)
    _, x_peer = peer.attack_single_run(x, y)
    x_ours = Square(200)(network, x, y, threat=threat, stream=numbers)
    clean, theirs, ours = (
        losses.signed_margin(network(z), y).clamp_min(0).mean() for z in (x, x_peer, x_ours)
    )
    assert float(ours) <= float(theirs) + 0.1 * float(clean)


def test_suite_has_the_verdict_of_autoattack(
    network: nn.Module, images: tuple[Tensor, Tensor, Stream]
) -> None:
    """APGD-CE and three targets, as the peer lists them: the same images survive, up to one."""
    pyautoattack = pytest.importorskip("pyautoattack")
    x, y, numbers = images[0][:10], images[1][:10], images[2][:10]
    peer = pyautoattack.AutoAttack(
        network,
        norm="Linf",
        eps=8 / 255,
        version="custom",
        device="cpu",
        seed=0,
        attacks=["apgd-ce", "apgd-t"],
    )
    peer.apgd.n_restarts, peer.apgd_targeted.n_restarts = 1, 1
    peer.apgd_targeted.n_target_classes = 3
    x_peer, _ = peer.run_standard_evaluation(x, y, batch_size=10)
    theirs = _broken(network, x_peer, y)
    threat = Threat("linf", 8 / 255)
    fast = _broken(network, attacks.fast()(network, x, y, threat=threat, stream=numbers), y)
    same = Suite((Apgd(), TargetedApgd(ranks=(1, 2, 3))))
    ours = _broken(network, same(network, x, y, threat=threat, stream=numbers), y)
    assert bool(theirs.any()) and not bool(theirs.all())
    assert int((ours != theirs).sum()) <= 1
    assert int((theirs & ~fast).sum()) == 0 and int((fast & ~theirs).sum()) <= 1


def test_foolbox_is_not_stronger(network: nn.Module, images: tuple[Tensor, Tensor, Stream]) -> None:
    foolbox = pytest.importorskip("foolbox")
    x, y, numbers = images
    bound = foolbox.PyTorchModel(network, bounds=(0, 1), device="cpu")
    attack = foolbox.attacks.LinfPGD(steps=20, rel_stepsize=0.125)
    torch.manual_seed(0)
    _, _, broken = attack(bound, x, y, epsilons=8 / 255)
    ours = _broken(
        network, Apgd(steps=20)(network, x, y, threat=Threat("linf", 8 / 255), stream=numbers), y
    )
    assert int(ours.sum()) >= int(broken.sum()) - 1


def test_torchattacks_is_not_stronger(
    network: nn.Module, images: tuple[Tensor, Tensor, Stream]
) -> None:
    torchattacks = pytest.importorskip(
        "torchattacks",
        exc_type=ImportError,
        reason="torchattacks is not installed; it asks for torchvision, which it "
        "does not use, so it is no extra of ours: pip install --no-deps torchattacks",
    )
    x, y, numbers = images
    torch.manual_seed(0)
    theirs = _broken(network, torchattacks.APGD(network, eps=8 / 255, steps=20, loss="ce")(x, y), y)
    ours = _broken(
        network, Apgd(steps=20)(network, x, y, threat=Threat("linf", 8 / 255), stream=numbers), y
    )
    assert int(ours.sum()) >= int(theirs.sum()) - 1


def test_pyautoattack_attacks_through_the_surrogate(
    network: nn.Module, images: tuple[Tensor, Tensor, Stream]
) -> None:
    """pyautoattack against a model with one-hot predictions and no gradient of its own.

    A constant loss shows no progress, so it is weaker than on the network itself, but not useless.
    """
    apgd = pytest.importorskip("pyautoattack.autopgd_base")
    x, y = images[0], images[1]

    class Hard(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                z = network(x)
            return torch.zeros_like(z).scatter(1, z.argmax(dim=1, keepdim=True), 9.0)

    def run(model: nn.Module) -> int:
        peer = apgd.APGDAttack(
            model, n_iter=20, norm="Linf", eps=8 / 255, loss="ce", device="cpu", seed=0
        )
        return int(_broken(network, peer.perturb(x, y), y).sum())

    assert run(attacks.straight_through(Hard(), network)) >= run(network) / 2 > 0
