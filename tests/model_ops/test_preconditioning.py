"""Adam's direction for single samples is the formula of LESS, from the optimizer's own state."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_megatrain.model_ops import GradientSettings, gradient_features
from lightning_megatrain.model_ops.preconditioning import AdamMoments
from lightning_megatrain.optim import HostAdamW
from tests.model_ops.subjects import MLP, bert, gpt2, llama, loop_gradients, mlp_batch, project, t5, text_batch, tied_llama


def less_direction(g: Tensor, m: Tensor, v: Tensor, t: int, beta1: float, beta2: float, eps: float) -> Tensor:
    """Section 2.2 of the paper, written again: t is the number of the coming step."""
    m_next = (beta1 * m + (1 - beta1) * g) / (1 - beta1**t)
    v_next = (beta2 * v + (1 - beta2) * g**2) / (1 - beta2**t)
    return m_next / torch.sqrt(v_next + eps)


def trained(
    module: nn.Module, batch: Any, optimizer_class: Any = torch.optim.AdamW, steps: int = 3, **options: Any
) -> torch.optim.Optimizer:
    from lightning_megatrain.model_ops import compute_sample_losses

    optimizer = optimizer_class(module.parameters(), lr=1e-2, **options)
    for _ in range(steps):
        compute_sample_losses(module, batch).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def expected_features(module: nn.Module, batch: Any, settings: GradientSettings, optimizer: torch.optim.Optimizer) -> Tensor:
    group = optimizer.param_groups[0]
    rows = []
    for gradients in loop_gradients(module, batch):
        directions = {}
        for name, g in gradients.items():
            state = optimizer.state[module.get_parameter(name)]
            directions[name] = less_direction(
                g, state["exp_avg"].to(g), state["exp_avg_sq"].to(g), int(state["step"]) + 1, *group["betas"], group["eps"]
            )
        rows.append(project(directions, settings))
    return torch.stack(rows)


def test_the_direction_in_numbers() -> None:
    """g = 1, m = 2, v = 4, betas 0.5 and 0.75, eps 1, the third step: m' = 1.5 / 0.875, v' = 3.25 / 0.578125."""
    moments = AdamMoments(torch.full((1, 1), 2.0), torch.full((1, 1), 4.0), 0.5, 0.75, 1.0, steps=2)
    found = moments.direction(torch.ones(1, 1, 1), torch.arange(1), slice(0, 1))
    assert found.item() == pytest.approx((1.5 / 0.875) / (3.25 / 0.578125 + 1) ** 0.5)


def test_the_root_is_taken_with_eps_inside() -> None:
    """Where v is near zero the two forms differ by orders of magnitude."""
    moments = AdamMoments(torch.zeros(1, 1), torch.zeros(1, 1), 0.9, 0.999, 1e-8, steps=0)
    found = moments.direction(torch.full((1, 1, 1), 1e-6), torch.arange(1), slice(0, 1)).item()
    assert found == pytest.approx(1e-6 / (1e-12 + 1e-8) ** 0.5)
    assert found < 0.02  # outside the root it would be 0.99


@pytest.mark.parametrize("kind", ["factored", "dense"])
@pytest.mark.parametrize(
    ("build", "batch"),
    [(llama, text_batch()), (tied_llama, text_batch()), (gpt2, text_batch()), (bert, text_batch(classes=3)), (MLP, mlp_batch())],
    ids=["llama", "tied llama", "tied gpt2", "bert", "mlp"],
)
def test_preconditioned_features_equal_a_loop_over_batches_of_one(build: Any, batch: Any, kind: Any) -> None:
    """In double precision: Adam divides by numbers near zero, which magnifies rounding."""
    module = build().double()
    batch = tuple(t.double() if t.is_floating_point() else t for t in batch) if isinstance(batch, tuple) else batch
    optimizer = trained(module, batch, betas=(0.8, 0.95), eps=1e-7)
    settings = GradientSettings(width=36, projection=kind, preconditioner="adam")
    expected = expected_features(module, batch, settings, optimizer)
    found = gradient_features(module, batch, settings, optimizers=[optimizer])
    assert (found - expected).abs().max() <= 1e-9 * expected.abs().max()


def test_preconditioned_features_in_single_precision_are_within_1e_5() -> None:
    module, batch = tied_llama(), text_batch()
    optimizer = trained(module, batch)
    settings = GradientSettings(width=64, preconditioner="adam")
    expected = expected_features(module, batch, settings, optimizer)
    found = gradient_features(module, batch, settings, optimizers=[optimizer])
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_a_parameter_that_takes_no_part_still_steps() -> None:
    """Adam moves a parameter with zero gradient by its momentum; so does the formula."""

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.used, self.other = nn.Linear(3, 3), nn.Linear(3, 3)
            self.branch = "both"

        def compute_sample_losses(self, batch: Tensor) -> Tensor:
            hidden = self.used(batch)
            return (hidden + self.other(batch) if self.branch == "both" else hidden).pow(2).sum(1)

    module, batch = Branches().double(), torch.randn(4, 3, dtype=torch.float64)
    optimizer = trained(module, batch)
    module.branch = "used"
    settings = GradientSettings(width=16, preconditioner="adam")
    torch.testing.assert_close(
        gradient_features(module, batch, settings, optimizers=[optimizer]), expected_features(module, batch, settings, optimizer)
    )


def test_a_layer_shared_by_many_uses_is_preconditioned_once() -> None:
    """T5's encoder and decoder share their embedding: the sum of both gradients goes into the root, not each alone."""
    module, batch = t5().double(), text_batch()
    for name, p in module.named_parameters():
        p.requires_grad_(name == "shared.weight" or "lm_head" in name)
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=1e-2)
    from lightning_megatrain.model_ops import compute_sample_losses

    compute_sample_losses(module, batch).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    settings = GradientSettings(width=36, preconditioner="adam")
    torch.testing.assert_close(
        gradient_features(module, batch, settings, optimizers=[optimizer]), expected_features(module, batch, settings, optimizer)
    )


@pytest.mark.parametrize("moments", ["fp32", "bf16"])
def test_the_host_optimizers_moments_are_read(moments: Any) -> None:
    module, batch, settings = llama(), text_batch(), GradientSettings(width=64, preconditioner="adam")
    optimizer = trained(module, batch, HostAdamW, moments=moments)
    expected = expected_features(module, batch, settings, optimizer)
    found = gradient_features(module, batch, settings, optimizers=[optimizer])
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_what_is_not_adams_state_is_refused() -> None:
    module, batch, settings = llama(), text_batch(), GradientSettings(width=64, preconditioner="adam")
    adam = torch.optim.AdamW(module.parameters())
    with pytest.raises(ValueError, match="made no step yet"):
        gradient_features(module, batch, settings, optimizers=[adam])
    with pytest.raises(ValueError, match="No optimizer holds"):
        gradient_features(module, batch, settings)
    with pytest.raises(ValueError, match="trained by SGD"):
        gradient_features(module, batch, settings, optimizers=[trained(module, batch, torch.optim.SGD)])
    with pytest.raises(ValueError, match="trained by amsgrad"):
        gradient_features(module, batch, settings, optimizers=[trained(module, batch, amsgrad=True)])
    with pytest.raises(ValueError, match="trained by maximize"):
        gradient_features(module, batch, settings, optimizers=[trained(module, batch, maximize=True)])
    for other in (torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam):  # state of the same names, another step
        with pytest.raises(ValueError, match=f"trained by {other.__name__}"):
            gradient_features(module, batch, settings, optimizers=[trained(module, batch, other)])
    with pytest.raises(ValueError, match=r"HostAdamW keeps .*'exp_avg_codes'.* moments='fp32' or 'bf16'"):
        gradient_features(module, batch, settings, optimizers=[trained(module, batch, HostAdamW, moments="int8")])
