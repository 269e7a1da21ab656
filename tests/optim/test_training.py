"""What the compact forms do to training, and what they cost."""

import pytest
import torch
from torch import Tensor, nn

from lightning_megatrain.optim import HostAdamW, bytes_per_parameter, split

VOCABULARY = 32


def test_split_masters_follow_fp32_training_bit_for_bit() -> None:
    """Given the same gradients: 200 steps of sizes that a BF16 weight mostly cannot take."""
    torch.manual_seed(0)
    exact = nn.Parameter(torch.randn(3000))
    halves = nn.Parameter(split(exact.detach())[0])
    one, two = HostAdamW([exact], lr=1e-4), HostAdamW([halves], lr=1e-4, masters="split")
    two.set_master(halves, exact.detach().clone())
    for _ in range(200):
        gradient = torch.randn(3000).bfloat16()
        one.update([exact], [gradient], grad_scale=0.37)
        two.update([halves], [gradient], grad_scale=0.37)
    assert torch.equal(two.master(halves), exact)
    assert torch.equal(halves, split(exact.detach())[0])


@pytest.mark.filterwarnings("ignore:masters=")
def test_a_hundred_small_steps_move_split_masters_and_leave_bf16_frozen() -> None:
    start = torch.full((256,), 1.0)  # a BF16 weight at 1 moves in steps of 1/256 down; 100 steps of 1e-5 make 1e-3
    ends = {}
    for masters in ("split", "none", "fp32"):
        weight = nn.Parameter(start.clone() if masters == "fp32" else start.bfloat16())
        optimizer = HostAdamW([weight], lr=1e-5, weight_decay=0.0, masters=masters)
        for _ in range(100):
            optimizer.update([weight], [torch.ones(256)])
        ends[masters] = optimizer.master(weight).float().clone()
    assert torch.equal(ends["none"], start)
    assert torch.equal(ends["split"], ends["fp32"])
    torch.testing.assert_close(ends["split"], start - 1e-3, rtol=0, atol=1e-5)  # Adam moves lr a step, less what FP32 rounds at 1


def test_gradients_of_split_weights_accumulate_in_fp32() -> None:
    weight = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    HostAdamW([weight], masters="split")
    for factor in (256.0, 1.0, 1.0):
        (weight.float() * factor).sum().backward()
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32
    assert weight.grad.item() == 258.0  # in BF16 the ones are lost: 256


def test_a_weight_written_from_outside_is_the_whole_value() -> None:
    weight = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = HostAdamW([weight], masters="split")
    optimizer.set_master(weight, torch.full((3,), 1.0 - 2.0**-20))
    with torch.no_grad():
        weight.copy_(torch.tensor([0.0, 2.0, -0.0]))
    assert optimizer.master(weight).tolist() == [0.0, 2.0, 0.0]
    optimizer.set_master(weight, torch.full((3,), 1.0 - 2.0**-20))
    weight.data.zero_()  # unseen by autograd, and by us: the low half stays, and must not turn zero into NaN
    optimizer.update([weight], [torch.zeros(3)])
    assert optimizer.master(weight).tolist() == [0.0, 0.0, 0.0]


class Predictor(nn.Module):
    """Predicts the next of a stream of symbols from the two before."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 32)
        self.body = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 128), nn.GELU())
        self.head = nn.Linear(128, VOCABULARY)

    def forward(self, pairs: Tensor) -> Tensor:  # (B, 2) -> (B, V)
        return self.head(self.body(self.embed(pairs).flatten(1)))


def final_loss(masters: str, moments: str) -> float:
    """The mean loss of the last 50 of 500 steps."""
    torch.manual_seed(0)
    model = Predictor()
    exact = {p: p.detach().clone() for p in model.parameters()}
    if masters == "split":
        model.bfloat16()
    optimizer = HostAdamW(model.parameters(), lr=2e-3, weight_decay=0.1, masters=masters, moments=moments)
    for parameter, value in exact.items():
        optimizer.set_master(parameter, value)
    generator = torch.Generator().manual_seed(1)
    # A second-order Markov chain: each pair of symbols has its own distribution over the next.
    chain = torch.softmax(2 * torch.randn(VOCABULARY, VOCABULARY, VOCABULARY, generator=generator), -1)
    losses = []
    for _ in range(500):
        pairs = torch.randint(0, VOCABULARY, (64, 2), generator=generator)
        target = torch.multinomial(chain[pairs[:, 0], pairs[:, 1]], 1, generator=generator)[:, 0]
        loss = nn.functional.cross_entropy(model(pairs).float(), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[:10]) / 10 > 1.1 * sum(losses[-50:]) / 50, "the task must be one that can be learned"
    return sum(losses[-50:]) / 50


@pytest.fixture(scope="module")
def fp32_loss() -> float:
    return final_loss("fp32", "fp32")


@pytest.mark.parametrize(
    ("masters", "moments"), [("fp32", "bf16"), ("fp32", "int8"), ("split", "fp32"), ("split", "bf16"), ("split", "int8")]
)
def test_after_500_steps_the_loss_is_that_of_fp32_within_one_percent(masters: str, moments: str, fp32_loss: float) -> None:
    assert final_loss(masters, moments) == pytest.approx(fp32_loss, rel=0.01)


@pytest.mark.parametrize(
    ("masters", "moments", "expected"),
    [("fp32", "fp32", 12), ("split", "fp32", 12), ("split", "bf16", 8), ("split", "int8", 6 + 8 / 256), ("none", "fp32", 10)],
)
@pytest.mark.filterwarnings("ignore:masters=")
def test_bytes_per_parameter_are_what_is_held(masters: str, moments: str, expected: float) -> None:
    n = 256 * 40
    weight = nn.Parameter(torch.zeros(n, dtype=torch.float32 if masters == "fp32" else torch.bfloat16))
    optimizer = HostAdamW([weight], masters=masters, moments=moments)
    optimizer.update([weight], [torch.ones(n)])
    held = [weight, *optimizer.state[weight].values()]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}
    assert sum(storages.values()) == expected * n + 4  # and the step
    assert bytes_per_parameter(masters, moments) == expected
    assert bytes_per_parameter("fp32", "fp32", working_copy=True, amsgrad=True) == 18
