"""CausalLM: a Hugging Face causal language model as a LightningModule.

Shapes: B rows, T tokens a row, V vocabulary.
"""

from __future__ import annotations

import inspect
import math
import time
from typing import Any, ClassVar

import lightning as L
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch.optim.lr_scheduler import LambdaLR
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from typing_extensions import override

from lightning_megatrain.datamodules.packing import IGNORED
from lightning_megatrain.language_model.evaluation import Evaluation, perplexity
from lightning_megatrain.language_model.hugging_face_models import build_model, import_class, import_peft, load_config
from lightning_megatrain.language_model.packing_check import check_packing
from lightning_megatrain.language_model.sampling import sample_text
from lightning_megatrain.language_model.schedules import Schedule, share_of_peak
from lightning_megatrain.language_model.sliced_loss import LossSlices
from lightning_megatrain.language_model.token_losses import tokens_without_padding
from lightning_megatrain.language_model.token_slices import slice_tokens
from lightning_megatrain.language_model.token_window import TokenWindow
from lightning_megatrain.strategy import MegaTrainStrategy

Batch = dict[str, torch.Tensor]


class CausalLM(L.LightningModule):
    """Train, validate and sample a Hugging Face causal LM.

    The loss is the mean over the label tokens of the whole accumulation window, over all devices, so batch 8, 4 x 2 and 8 x 1 give the
    same gradient; see :mod:`.token_window`. A mixture-of-experts model's router loss is added where its config
    asks for it (`output_router_logits`), weighted by label tokens too; it is no mean over tokens and depends on how the window is cut.

    Weights are built in :meth:`configure_model`, after the data was checked, straight into host memory, in FP32.

    Logged at each optimizer step: `train_loss`, `train_perplexity`, `tokens_per_second` (without padding), `trained_tokens_per_second`
    (those with a label). Over a whole validation: `val_loss` and `val_perplexity` over all label tokens, and the same `/<domain>` for
    each loader, named by the datamodule's `domain_names` or else by number. The same for `test_`.

    Args:
        model: A hub id, a local folder, or the config of a model to initialise at random: `model_type` and its fields.
        revision: The version of a hub model.
        attn_implementation: `"sdpa"`, `"eager"`, ... None: what transformers chooses.
        lora: Arguments of `peft.LoraConfig`, for example `{r: 16, target_modules: all-linear}`; only adapters train. Needs the extra
            `lora`. None: all weights train.
        optimizer: The class to build, as a dotted path. It gets two groups: weights, and norms and biases (all of one dimension)
            without weight decay.
        optimizer_args: Further arguments of the class, for example `{betas: [0.9, 0.95]}`.
        learning_rate: The peak.
        weight_decay: Of the first group.
        schedule: How the rate goes from its peak at the end of the warmup to `min_lr_ratio` of it at the last step.
        warmup_steps: Optimizer steps over which the rate rises evenly to its peak.
        min_lr_ratio: The last rate as a share of the peak; `"constant"` ignores it.
        loss_slice: Tokens of a micro-batch for which logits exist at a time. A micro-batch of more runs its output embedding and loss slice
            by slice, and once more in backward: logits take slice x V instead of B x T x V, for one more forward of the head. The loss
            and its gradient are the same but for the order of FP32 sums. A model of which the way from hidden states to logits is not
            known is named in a warning and runs whole. None: always whole.
        token_slice: Tokens of a micro-batch that MLPs and norms work on at a time, for long contexts. They keep their input alone and run
            once more in backward: under `strategy="megatrain"` a third time. Results are the same but for the order of FP32 sums.
            None: all tokens at once. See docs/long_context.md.

    Raises:
        ValueError: The model's config cannot be found or a setting is out of range.
        ModuleNotFoundError: `lora` is given but peft is not installed.
    """

    megatrain_defaults: ClassVar[dict[str, Any]] = {"masters": "auto", "overlap_optimizer": True}
    """What `MegaTrainStrategy` does where its own options are left out: no weight of a layer is read here but by calling the layer."""

    def __init__(
        self,
        model: str | dict[str, Any],
        revision: str | None = None,
        attn_implementation: str | None = None,
        lora: dict[str, Any] | None = None,
        optimizer: str = "torch.optim.AdamW",
        optimizer_args: dict[str, Any] | None = None,
        learning_rate: float = 3e-4,
        weight_decay: float = 0.1,
        schedule: Schedule = "cosine",
        warmup_steps: int = 0,
        min_lr_ratio: float = 0.1,
        loss_slice: int | None = 4096,
        token_slice: int | None = None,
    ) -> None:
        super().__init__()
        if schedule not in ("cosine", "linear", "constant"):
            raise ValueError(f"`schedule` is {schedule!r}: it must be 'cosine', 'linear' or 'constant'.")
        if not (learning_rate > 0 and weight_decay >= 0 and warmup_steps >= 0 and 0 <= min_lr_ratio <= 1):
            raise ValueError(
                f"One of {learning_rate=}, {weight_decay=}, {warmup_steps=}, {min_lr_ratio=} is out of range: the rate must be above 0, "
                "decay and warmup at least 0, and the ratio between 0 and 1."
            )
        for name, tokens in (("loss_slice", loss_slice), ("token_slice", token_slice)):
            if tokens is not None and tokens < 1:
                raise ValueError(f"`{name}` is {tokens}: it must be at least 1 token, or None for the whole micro-batch at once.")
        if lora is not None:
            import_peft()
        self.save_hyperparameters(frame=inspect.currentframe())  # Lightning's own look for it leaves a cycle that keeps the weights
        # not read from `hparams`: a subclass's arguments of the same name take their place there
        self.learning_rate, self.weight_decay, self.optimizer_args = learning_rate, weight_decay, optimizer_args or {}
        self.schedule, self.warmup_steps, self.min_lr_ratio = schedule, warmup_steps, min_lr_ratio
        self._model, self._revision, self._attn_implementation, self._lora = model, revision, attn_implementation, lora
        self._token_slice = token_slice
        self.config: PretrainedConfig = load_config(model, revision)
        self.optimizer_class = import_class(optimizer)
        self.model: PreTrainedModel | None = None
        """The Hugging Face model (under peft's wrapper with `lora`), once :meth:`configure_model` has run."""
        self.window = TokenWindow()
        self._evaluation = Evaluation()
        self._clock: float | None = None
        self._seconds = 0.0  # of the window so far
        self._tokens = [0, 0]  # of the window so far: without padding, with a label
        self._packing_checked = False
        self._loss_slices = LossSlices(loss_slice)

    @override
    def configure_model(self) -> None:
        """Build the model and its weights, once."""
        if self.model is not None:
            return
        self.model = self.build(pretrained=isinstance(self._model, str)).train()

    def build(self, pretrained: bool) -> PreTrainedModel:
        """Make a Hugging Face model as the arguments say, adapters included.

        Args:
            pretrained: Load the weights; else they are random.
        """
        model = build_model(self._model, self.config, self._revision, self._attn_implementation, self._lora, pretrained)
        if self._token_slice is not None:
            slice_tokens(model, self._token_slice)
        return model

    @override
    def forward(self, batch: Batch) -> torch.Tensor:
        """Logits (B, T, V) of a batch; its labels are not looked at."""
        return self._run(batch).logits

    def compute_token_losses(self, batch: Batch) -> torch.Tensor:
        """Loss of each label token, (B, T - 1) FP32, zero where the label is `-100`; `model_ops` asks for it, too."""
        return self._run_to_losses(batch)[1]

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        """The loss of a micro-batch, the loss sum and label tokens of each row (B,), and each token's loss, with its graph."""
        self._check_packing(batch)
        outputs, losses = self._run_to_losses(batch)
        counts = (batch["labels"][:, 1:] != IGNORED).sum(1)
        loss_sum = losses.sum()
        if getattr(outputs, "aux_loss", None) is not None and self.config.output_router_logits:
            loss_sum = loss_sum + self.config.router_aux_loss_coef * outputs.aux_loss.to(loss_sum.device) * counts.sum()

        if batch_idx % self.trainer.accumulate_grad_batches == 0:
            self.window.start()
        totals = self._mean_over_processes(torch.stack([loss_sum.detach().double(), counts.sum().double()]))
        if not math.isfinite(totals[0]):
            self._refuse_loss(totals[0], batch_idx)
        self.window.add(*totals)
        self._log_window(batch, counts)
        return {
            "loss": loss_sum / self.window.divisor,
            "sample_losses": losses.detach().sum(1),
            "sample_tokens": counts,
            "token_losses": losses,
            "loss_divisor": torch.tensor(self.window.divisor, dtype=torch.float32),
        }

    @override
    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Run backward, and after the window's last give its gradients their weight (before any hook or clipping sees them)."""
        ends, strategy = self._window_ends(), self.trainer.strategy
        factor = self.window.factor(self.trainer.accumulate_grad_batches) if ends else 1.0
        scaled = factor != 1.0 and isinstance(strategy, MegaTrainStrategy) and strategy.scale_gradients(factor)
        super().backward(loss, *args, **kwargs)
        if ends and not scaled:
            self.window.correct(self.parameters(), self.trainer.accumulate_grad_batches)

    @override
    def configure_optimizers(self) -> OptimizerLRScheduler:
        assert self.model is not None
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        groups = [
            {"params": [p for p in trained if p.dim() > 1], "weight_decay": self.weight_decay},
            {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},  # norms and biases
        ]
        optimizer = self.optimizer_class([group for group in groups if group["params"]], lr=self.learning_rate, **self.optimizer_args)
        if self.schedule != "constant" and self.trainer.max_steps == -1 and self.trainer.max_epochs == -1:
            raise MisconfigurationException(
                f"schedule={self.schedule!r} ends with the training, which has no end: set `max_steps` or `max_epochs` "
                "in the Trainer, or schedule='constant'."
            )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": LambdaLR(optimizer, self._rate), "interval": "step"}}

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._clock = self._clock or time.perf_counter()

    @override
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        now = time.perf_counter()
        self._seconds += now - (self._clock or now)
        self._clock = now  # the wait for the next batch counts, a validation in between does not
        if self._window_ends():
            for name, tokens in zip(("tokens_per_second", "trained_tokens_per_second"), self._tokens, strict=True):
                self.log(name, self.trainer.world_size * tokens / max(self._seconds, 1e-9))
            self._seconds, self._tokens = 0.0, [0, 0]

    @override
    def on_validation_start(self) -> None:
        self._clock = None
        self._evaluation = Evaluation()

    @override
    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._evaluate(batch, dataloader_idx)

    @override
    def on_validation_epoch_end(self) -> None:
        self._evaluation.log(self, "val", self._mean_over_processes)

    @override
    def on_test_start(self) -> None:
        self._evaluation = Evaluation()

    @override
    def test_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._evaluate(batch, dataloader_idx)

    @override
    def on_test_epoch_end(self) -> None:
        self._evaluation.log(self, "test", self._mean_over_processes)

    @override
    def predict_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> dict[str, torch.Tensor]:
        """Score a batch: the loss sum (B,) FP32 and the label tokens (B,) int64 of each row."""
        return {"loss": self.compute_token_losses(batch).sum(1), "tokens": (batch["labels"][:, 1:] != IGNORED).sum(1)}

    def generate(self, prompt: str, tokenizer: PreTrainedTokenizerBase, max_new_tokens: int = 100, seed: int = 0, **options: Any) -> str:
        """Continue a text, after training or between two steps. The global random state is left as it was.

        Args:
            prompt: The text to go on from, without which the tokenizer's begin or end token starts.
            tokenizer: The model's, for example `datamodule.tokenizer`.
            max_new_tokens: How much to add.
            seed: Of the sampling.
            options: Of `transformers` `generate`, over `do_sample=True`.

        Returns:
            The prompt and what follows.
        """
        self.configure_model()
        assert self.model is not None
        return sample_text(self.model, self.device, prompt, tokenizer, max_new_tokens, seed, **options)

    def _run(self, batch: Batch) -> Any:
        assert self.model is not None, "configure_model() builds the model; the Trainer calls it, or call it yourself."
        inputs = {key: batch[key] for key in ("input_ids", "attention_mask", "position_ids") if key in batch}
        # With a cache transformers takes the row for one document and lets packed ones see each other.
        return self.model(**inputs, use_cache=False)

    def _run_to_losses(self, batch: Batch) -> tuple[Any, torch.Tensor]:
        """The model's output, without logits where they are made in slices, and each token's loss (B, T - 1)."""
        assert self.model is not None
        return self._loss_slices.run(self.model, lambda: self._run(batch), batch["labels"], getattr(self._trainer, "strategy", None))

    def _mean_over_processes(self, totals: torch.Tensor) -> list[float]:
        if self.trainer.world_size > 1:
            totals = self.trainer.strategy.reduce(totals, reduce_op="mean")
        return [float(total) for total in totals.tolist()]

    def _window_ends(self) -> bool:
        # Lightning's own answer to "is this the micro-batch that steps", the last and shorter window of an epoch included.
        return not self.trainer.fit_loop._should_accumulate()

    def _refuse_loss(self, loss: float, batch_idx: int) -> None:
        rate = self.trainer.optimizers[0].param_groups[0]["lr"]
        raise FloatingPointError(
            f"The loss is {loss} at step {self.trainer.global_step} (epoch {self.trainer.current_epoch}, batch {batch_idx}, "
            f"learning rate {rate:g}). No weight was changed by it. Lower `learning_rate`, set `gradient_clip_val` in the Trainer "
            "or lengthen `warmup_steps`, and look at that batch; `ckpt_path` resumes from the last checkpoint."
        )

    def _log_window(self, batch: Batch, counts: torch.Tensor) -> None:
        self._tokens[0] += tokens_without_padding(batch)
        self._tokens[1] += int(counts.sum())
        if not self._window_ends():
            return
        if not self.window.count:
            raise ValueError(
                f"No token to train on in step {self.trainer.global_step}: every label of its {self.trainer.accumulate_grad_batches} "
                f"micro-batches is {IGNORED}. Look at the data's `labels`."
            )
        for name, value in (("train_loss", self.window.mean_loss), ("train_perplexity", perplexity(self.window.mean_loss))):
            # As a tensor: in a step of `bf16-true` Lightning would round a number to BF16.
            self.log(name, torch.tensor(value, dtype=torch.float32, device=self.device), prog_bar=name == "train_loss")

    def _evaluate(self, batch: Batch, dataloader_idx: int) -> None:
        self._check_packing(batch)
        self._evaluation.add(dataloader_idx, self.compute_token_losses(batch), batch["labels"][:, 1:] != IGNORED)

    def _rate(self, step: int) -> float:
        # The number of steps is asked for only while training: before, it would build the loaders early, and Lightning would lose their
        # resumed position.
        return share_of_peak(self.schedule, step, lambda: self.trainer.estimated_stepping_batches, self.warmup_steps, self.min_lr_ratio)

    def _check_packing(self, batch: Batch) -> None:
        """Once, before the first batch of packed documents: see that this model keeps them apart."""
        if self._packing_checked or "attention_mask" in batch or "position_ids" not in batch:
            return
        self._packing_checked = True
        assert self.model is not None
        check_packing(self.model, self._run, self.device, rounding=1e-3 if self.trainer.precision == "32-true" else 2e-2)
