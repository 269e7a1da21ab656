"""DoReMi: learn the shares of domains from where a small model falls behind a reference.

Shapes: B samples, T tokens, K domains.
"""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.plugins.precision import HalfPrecision
from numpy.typing import NDArray
from torch import Tensor, nn
from typing_extensions import override

from lightning_megatrain import model_ops
from lightning_megatrain.callbacks.gather import gather_rows
from lightning_megatrain.callbacks.loader_access import refuse_overfitting
from lightning_megatrain.callbacks.reweighting.reweighting import ReweightingPolicy
from lightning_megatrain.callbacks.step_losses import StepLosses
from lightning_megatrain.model_ops.hugging_face import find_model


class DoReMi(ReweightingPolicy):
    r"""Group distributionally robust optimisation of a proxy model over domains (arXiv 2305.10429, algorithm 1).

    The proxy is trained on all domains alike; its loss weights each domain's mean token loss by :math:`\alpha`. After each optimizer
    step, from the
    tokens of all ranks and micro-batches of that step,

    .. math::
        \lambda_d &= \frac{1}{\sum_{x \in D_d} |x|} \sum_{x \in D_d} \sum_j \max\{\ell_\theta(x_j) - \ell_{ref}(x_j), 0\} \\
        \alpha'_d &\propto \alpha_d \exp(\eta \lambda_d), \qquad \alpha = (1 - c) \alpha' + c / K

    A domain without a sample in the step keeps its last :math:`\lambda`. The mean of :math:`\alpha` over all updates is the result:
    written to
    ``<log_dir>/policies/<name>/average_shares.json``, from which ``StaticMixture`` trains the final model. The paper weights a step
    by the :math:`\alpha` that
    its own losses give; here, since with accumulation these are known only when its backward has run, by that of the step before.

    The proxy's losses are those of its training step; the reference costs one forward per micro-batch and must fit on the device
    beside the proxy. Where no
    Hugging Face model gives the loss of each token, the difference is taken per sample.

    Args:
        reference: The trained reference: a Lightning checkpoint of the same module, or a folder or hub id of a Hugging Face causal LM.
        step_size: :math:`\eta` (default: 1; ``"dataflex"``: 0.1).
        smoothing: c (default: 1e-3; ``"dataflex"``: 0.01).
        variant: ``"dataflex"`` changes these defaults, and takes the mean off :math:`\lambda` and holds it within 5.
        **policy: Schedule, domain and so on; see :class:`~lightning_megatrain.callbacks.Policy`. From ``warmup_steps`` on every step
            is weighted, and
            :math:`\alpha` is updated every ``every_n_steps``, first when a step was weighted.

    Raises:
        TypeError: the reference is no string.
        ValueError: an argument is out of range.
        FileNotFoundError: there is no such reference.
    """

    needs_tokens = True

    def __init__(
        self,
        reference: str,
        *,
        step_size: float | None = None,
        smoothing: float | None = None,
        variant: Literal["paper", "dataflex"] = "paper",
        **policy: Any,
    ) -> None:
        super().__init__(**policy)
        if variant not in ("paper", "dataflex"):
            raise ValueError(f"`variant` must be 'paper' or 'dataflex', got {variant!r}.")
        self.reference, self.variant = reference, variant
        self.step_size = step_size if step_size is not None else 0.1 if variant == "dataflex" else 1.0
        self.smoothing = smoothing if smoothing is not None else 0.01 if variant == "dataflex" else 1e-3
        if not isinstance(reference, str):
            raise TypeError(f"`reference` must be the path of a checkpoint, or a folder or hub id of a model, got {reference!r}.")
        if not 0 < self.step_size < math.inf or not 0 <= self.smoothing <= 1:
            raise ValueError(f"`step_size` must be positive and `smoothing` between 0 and 1, got {self.step_size} and {self.smoothing}.")
        if reference.endswith(".ckpt") and not Path(reference).exists():
            raise FileNotFoundError(f"There is no reference checkpoint {reference}. Train one with the same module first.")
        self._reference: nn.Module | None = None
        self._domains: list[str] = []
        self._weights_K = np.zeros(0)  # alpha
        self._excess_K = np.zeros(0)  # lambda
        self._total_K = np.zeros(0)  # sum of alpha over updates
        self._seen_K2 = np.zeros((0, 2))  # of the step under way, on all ranks: sum of excess losses, tokens

    @property
    def average_shares(self) -> dict[str, float]:
        """The mean of the domain weights over all updates so far; before the first, the weights themselves."""
        total_K = self._total_K if self._total_K.any() else self._weights_K
        return dict(zip(self._domains, (total_K / total_K.sum()).tolist(), strict=True))

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit" and self.schedule.max_updates != 0 and self._reference is None:
            with self._naming_errors(trainer):
                self._reference = _load_reference(self.reference, pl_module)
        super().setup(trainer, pl_module, stage)

    @override
    def prepare(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        domains = self._domains = self.loader.domains
        if self.schedule.max_updates != 0:
            refuse_overfitting(trainer, self.name)
        if not len(self._weights_K):
            k = len(domains)
            self._weights_K, self._excess_K = np.full(k, 1 / k), np.zeros(k)
            self._total_K, self._seen_K2 = np.zeros(k), np.zeros((k, 2))
            if self.schedule.max_updates != 0:
                self.loader.set_proportions(dict.fromkeys(domains, 1.0))
        if self._reference is not None:
            self._reference.requires_grad_(False).eval().to(trainer.strategy.root_device)

    @override
    def due(self, step: int) -> bool:
        return bool(self._seen_K2[:, 1].any()) and super().due(step)

    @override
    def weighs(self, step: int) -> bool:
        return step >= self.schedule.warmup_steps

    @override
    def weigh(self, losses: StepLosses, batch: Any) -> Tensor:
        assert self._trainer is not None
        last = self.loader.last
        assert last is not None
        assert last.domain is not None
        domain_B = last.domain.to(losses.losses_BT.device)
        excess_B = self._excess(losses, batch)
        rows_B3 = torch.stack([domain_B.float(), excess_B, losses.tokens_B], dim=1)
        rows_G3 = gather_rows(rows_B3, self._trainer).double().cpu().numpy()
        np.add.at(self._seen_K2, rows_G3[:, 0].astype(int), rows_G3[:, 1:])
        tokens_K = np.bincount(rows_G3[:, 0].astype(int), rows_G3[:, 2], len(self._weights_K))
        per_token_K = torch.from_numpy(self._weights_K / np.maximum(tokens_K, 1)).float().to(domain_B.device)
        return per_token_K[domain_B] * losses.divisor  # each micro-batch counts alike, however many tokens it has

    @override
    def act(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        seen_K2, self._seen_K2 = self._seen_K2, np.zeros_like(self._seen_K2)

        def decide() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
            excess_K = np.where(seen_K2[:, 1] > 0, seen_K2[:, 0] / np.maximum(seen_K2[:, 1], 1), self._excess_K)
            step_K = (excess_K - excess_K.mean()).clip(-5, 5) if self.variant == "dataflex" else excess_K
            return excess_K, update_weights(self._weights_K, step_K, self.step_size, self.smoothing)

        self._excess_K, self._weights_K = self.agree(trainer, decide)
        self._total_K = self._total_K + self._weights_K
        self.report(
            trainer,
            {f"share/{n}": a for n, a in zip(self.loader.domains, self._weights_K, strict=True)}
            | {f"excess/{n}": e for n, e in zip(self.loader.domains, self._excess_K, strict=True)},
        )

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_end(trainer, pl_module)
        if trainer.is_global_zero and self._total_K.any():
            self._folder.mkdir(parents=True, exist_ok=True)
            write_shares(self._folder / "average_shares.json", self.average_shares)

    @override
    def own_state(self) -> dict[str, Any]:
        arrays = {"weights": self._weights_K, "excess": self._excess_K, "total": self._total_K, "seen": self._seen_K2}
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        return {**super().own_state(), **tensors, "domains": list(self._domains)}

    @override
    def load_own_state(self, state: dict[str, Any]) -> None:
        super().load_own_state(state)
        self._domains = state["domains"]
        self._weights_K, self._excess_K = state["weights"].numpy(), state["excess"].numpy()
        self._total_K, self._seen_K2 = state["total"].numpy(), state["seen"].numpy()

    def _excess(self, losses: StepLosses, batch: Any) -> Tensor:
        """Return the sum of each sample's excess token losses, (B,) FP32."""
        assert self._trainer is not None
        assert self._reference is not None
        with self._trainer.precision_plugin.forward_context():
            if find_model(self._reference) is not None:
                reference_BT, _ = model_ops.token_losses(self._reference, batch)
                if reference_BT.shape == losses.losses_BT.shape:
                    return (losses.losses_BT - reference_BT).clamp(min=0).sum(1)
            reference_B = model_ops.sample_losses(self._reference, batch)
        return (losses.means_B - reference_B).clamp(min=0) * losses.tokens_B


def update_weights(
    weights_K: NDArray[np.float64], excess_K: NDArray[np.float64], step_size: float, smoothing: float
) -> NDArray[np.float64]:
    """Return the new domain weights, (K,): an exponentiated step, then smoothed.

    Args:
        weights_K: The weights so far, which sum to one.
        excess_K: The excess loss of each domain.
        step_size: Eta.
        smoothing: c, the part that is shared alike.
    """
    log_K = np.log(weights_K) + step_size * excess_K
    stepped_K = np.exp(log_K - log_K.max())
    return (1 - smoothing) * stepped_K / stepped_K.sum() + smoothing / len(weights_K)


def write_shares(file: Path, shares: dict[str, float]) -> None:
    """Write shares as JSON that :class:`StaticMixture` reads: the whole file or none of it."""
    part = file.with_name(f".{file.name}.part")
    part.write_text(json.dumps(shares, indent=2) + "\n")
    part.replace(file)


def _load_reference(reference: str, module: pl.LightningModule) -> nn.Module:
    if Path(reference).is_file():
        model: Any = copy.deepcopy(module)
        model.configure_model()
        model.load_state_dict(torch.load(reference, map_location="cpu", weights_only=False)["state_dict"])
    else:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(reference, dtype=torch.float32)
    # It is given what the proxy is given, with bf16-true BF16; megatrain's own plugin leaves that to the engine.
    plugin = module.trainer.precision_plugin
    return HalfPrecision.convert_module(plugin, model) if isinstance(plugin, HalfPrecision) else plugin.convert_module(model)
