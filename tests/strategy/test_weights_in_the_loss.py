"""Parameters used by the loss itself, past any module's forward: regularisers, penalties, tied logits."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.strategy.compare import MakeTrainer, Place, Recorder, assert_same, both
from tests.strategy.subject import Subject, batches


class L2(Subject):
    """Every parameter, resident and streamed, gets a gradient from its own norm as well."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        penalty = sum(p.square().sum() for p in self.parameters())
        return self.loss(batch) + 1e-2 * penalty  # type: ignore[operator]


class L1OfStreamed(Subject):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        return loss + 1e-2 * self.net.blocks[1].up.weight.abs().sum().to(loss.device)


class TiedLogits(Subject):
    """The head's weight is the embedding's, used by name."""

    def forward(self, tokens_BT: Tensor) -> Tensor:
        hidden_BTD = self.net.embedding(tokens_BT)
        for block in self.net.blocks:
            hidden_BTD = block(hidden_BTD)
        return hidden_BTD @ self.net.embedding.weight.T


@pytest.mark.parametrize("kind", [L2, L1OfStreamed, TiedLogits])
def test_gradients_from_the_loss_and_from_layers_add_up(place: Place, kind: type[Subject]) -> None:
    def run(make: MakeTrainer) -> Any:
        model, record = kind(), Recorder()
        make(max_epochs=2, callbacks=[record]).fit(model, batches())
        return record.everything(model)

    assert_same(run, place)


def test_they_add_up_over_micro_batches(place: Place) -> None:
    """As autograd does it: one backward's two parts are summed before they are added to the last one's."""

    def run(make: MakeTrainer) -> Any:
        model, record = L2(), Recorder()
        make(max_epochs=2, accumulate_grad_batches=3, callbacks=[record]).fit(model, batches())
        return record.everything(model)

    assert_same(run, place)


def test_they_add_up_where_the_layer_is_called_twice(place: Place) -> None:
    """Within 1e-6: three gradients of one weight are added in another order than autograd's."""

    class CalledTwice(L2):
        def forward(self, tokens_BT: Tensor) -> Tensor:
            hidden_BTD = self.net.embedding(tokens_BT)
            for block in (*self.net.blocks, self.net.blocks[0]):
                hidden_BTD = block(hidden_BTD)
            return self.net.head(self.net.norm(hidden_BTD))

    def run(make: MakeTrainer) -> Any:
        model, record = CalledTwice(), Recorder()
        make(max_steps=1, callbacks=[record]).fit(model, batches())
        return record.gradients

    expected, found = both(run, place)
    assert len(found) == 1
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
