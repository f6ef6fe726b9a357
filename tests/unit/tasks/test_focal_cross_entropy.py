"""The loss of task docqa on tokens is the papers' formula, and its gradient is finite everywhere."""

from __future__ import annotations

import math

import pytest
import torch

from dstrain.tasks.docqa import focal_cross_entropy


def test_label_smoothing_by_hand() -> None:
    """Szegedy et al., section 7: cross entropy with 0.9 of the target's distribution and 0.1 of the uniform one."""
    log_probs = torch.log(torch.tensor([0.5, 0.25, 0.25]))
    smoothed = [0.9 + 0.1 / 3, 0.1 / 3, 0.1 / 3]
    wanted = -sum(share * math.log(p) for share, p in zip(smoothed, (0.5, 0.25, 0.25), strict=True))
    found = focal_cross_entropy(log_probs[:1], log_probs.mean()[None], 0.1)
    assert float(found) == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize(("p", "gamma", "wanted"), [(0.9, 2.0, 0.00105361), (0.1, 2.0, 1.86509), (0.5, 0.0, 0.693147)])
def test_focal_weighting_by_hand(p: float, gamma: float, wanted: float) -> None:
    """Lin et al., eq. 4: -(1 - p)^gamma log p; at p = 0.9 and gamma 2 the loss is 100 times smaller."""
    assert float(focal_cross_entropy(torch.tensor(p).log(), None, 0.0, gamma)) == pytest.approx(wanted, rel=1e-4)


def test_both_are_those_of_torch_on_all_logits() -> None:
    torch.manual_seed(0)
    logits, targets = torch.randn(7, 11, dtype=torch.float64), torch.randint(11, (7,))
    gradients = []
    for own in (False, True):
        one = logits.clone().requires_grad_()
        log_probs = one.log_softmax(-1)
        picked = log_probs.gather(-1, targets[:, None])[:, 0]
        smoothed = torch.nn.functional.cross_entropy(one, targets, label_smoothing=0.2, reduction="none")
        plain = (1 - picked.exp()) ** 1.5 * smoothed
        loss = focal_cross_entropy(picked, log_probs.mean(-1), 0.2, 1.5) if own else plain
        loss.sum().backward()
        assert one.grad is not None
        gradients.append((loss.detach(), one.grad))
    assert torch.allclose(gradients[0][0], gradients[1][0])
    assert torch.allclose(gradients[0][1], gradients[1][1], atol=1e-12)


@pytest.mark.parametrize("gamma", [0.5, 1.0, 2.0])
def test_a_certain_token_has_a_finite_gradient(gamma: float) -> None:
    log_probs = torch.tensor([0.0, 1e-7, -1e-12, -50.0], requires_grad=True)  # rounding may give log p above 0
    loss = focal_cross_entropy(log_probs, None, 0.0, gamma)
    loss.sum().backward()
    assert log_probs.grad is not None
    assert log_probs.grad.isfinite().all()
    assert loss[0] == 0
