"""Text from the model being trained.

Shapes: B samples, T tokens.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_megatrain.model_ops.context import device_of, on_device, precision_of, step_of, through_wrapper, trainer_of
from lightning_megatrain.model_ops.hugging_face import IGNORED, base_of, find_model
from lightning_megatrain.model_ops.trace import leave_no_trace


def generate(
    module: nn.Module,
    batch: Any,
    max_new_tokens: int = 64,
    *,
    prompt: str = "all",
    num_samples: int = 1,
    seed: int | None = None,
    **options: Any,
) -> list[list[Tensor]]:
    """Returns new tokens for each sample, from one batched generation in evaluation mode that leaves no trace.

    Prompts are padded on the left here, whichever side the batch is padded on. Under the megatrain strategy every new token streams the
    whole model once: use large batches. A module of another kind defines `compute_generations(self, batch, max_new_tokens, num_samples,
    **options)`, which is also asked first where it exists.

    Args:
        module: a LightningModule (inside a Trainer: its device, precision and strategy are used) or any `nn.Module`.
        batch: a mapping with `input_ids` (B, T) and, where there is padding, `attention_mask` (B, T).
        max_new_tokens: the most tokens to make for a sample. (default: 64)
        prompt: `"all"`, the whole of `input_ids`; or `"unlabelled"`, the tokens before the first one whose label counts. (default: `"all"`)
        num_samples: continuations of each sample; above 1 they are drawn, not greedy. (default: 1)
        seed: of the draw; None draws from the generators as they stand, which are put back, so that the next call draws the same. (default:
            None)
        options: passed to `model.generate`: `do_sample`, `temperature`, `top_p`, ...

    Returns:
        For each sample a list of `num_samples` int64 tensors, the new tokens without padding, the end-of-sequence token included.

    Raises:
        TypeError: when the module neither holds a Hugging Face model that can generate nor defines the hook.
        ValueError: for an unknown `prompt`, `"unlabelled"` without labels, or fewer than one token or sample.
    """
    if prompt not in ("all", "unlabelled"):
        raise ValueError(f"prompt={prompt!r} is neither 'all' nor 'unlabelled'.")
    if max_new_tokens < 1 or num_samples < 1:
        raise ValueError(f"`max_new_tokens` and `num_samples` must be at least 1, got {max_new_tokens} and {num_samples}.")
    hook = getattr(module, "compute_generations", None)
    model = None if hook is not None else find_model(module)
    if hook is None and (model is None or not base_of(model).can_generate()):
        raise TypeError(
            f"{type(module).__name__} holds no Hugging Face model that can generate. Define on it "
            "`compute_generations(self, batch, max_new_tokens, num_samples, **options)`, returning for each sample a list of int64 tensors."
        )
    if num_samples > 1:
        options = {"do_sample": True, **options}

    def call(b: Any) -> list[list[Tensor]]:
        with precision_of(module):
            if hook is not None:
                return hook(b, max_new_tokens=max_new_tokens, num_samples=num_samples, **options)
            return _generate(module, model, b, max_new_tokens, prompt, num_samples, options)  # type: ignore[arg-type]

    with torch.no_grad(), leave_no_trace(module), step_of(module):
        if seed is not None:
            torch.manual_seed(seed)
        return through_wrapper(module, call, on_device(batch, device_of(module)))


def _generate(
    module: nn.Module, model: nn.Module, batch: Any, max_new_tokens: int, prompt: str, num_samples: int, options: dict[str, Any]
) -> list[list[Tensor]]:
    base = base_of(model)
    ids_BT, mask_BT = _prompts(batch, prompt, _pad_token(base), left=not base.config.is_encoder_decoder)
    tokens = model.generate(  # type: ignore[operator]
        input_ids=ids_BT,
        attention_mask=mask_BT,
        max_new_tokens=max_new_tokens,
        num_return_sequences=num_samples,
        pad_token_id=_pad_token(base),
        synced_gpus=_is_sharded(module),
        **options,
    )
    new = tokens[:, 1 if base.config.is_encoder_decoder else ids_BT.shape[1] :]
    ends = _end_tokens(base)
    rows = [_until_end(row, ends) for row in new]
    return [rows[i : i + num_samples] for i in range(0, len(rows), num_samples)]


def _prompts(batch: Any, prompt: str, pad_token: int, left: bool) -> tuple[Tensor, Tensor]:
    """Returns the prompts' tokens and mask (B, T), moved to the right end (`left` padding) or the left, as long as the longest."""
    ids_BT = batch["input_ids"]
    mask_BT = batch["attention_mask"].bool() if "attention_mask" in batch else torch.ones_like(ids_BT, dtype=torch.bool)
    if prompt == "unlabelled":
        if "labels" not in batch:
            raise ValueError("prompt='unlabelled' needs `labels` in the batch. Add them in the collate function, or use prompt='all'.")
        mask_BT = mask_BT & ((batch["labels"] != IGNORED).cumsum(1) == 0)
    longest = max(int(mask_BT.sum(1).max()), 1)
    order_BT = torch.argsort(mask_BT.to(torch.int8), dim=1, stable=True, descending=not left)
    keep = slice(ids_BT.shape[1] - longest, None) if left else slice(0, longest)
    ids_BT, mask_BT = ids_BT.gather(1, order_BT)[:, keep], mask_BT.gather(1, order_BT)[:, keep]
    return ids_BT.masked_fill(~mask_BT, pad_token), mask_BT.long()


def _end_tokens(model: Any) -> list[int]:
    end = model.generation_config.eos_token_id
    return [] if end is None else list(end) if isinstance(end, list | tuple) else [int(end)]


def _pad_token(model: Any) -> int:
    pad = model.generation_config.pad_token_id
    return int(pad) if pad is not None else (_end_tokens(model) or [0])[0]


def _until_end(row_T: Tensor, ends: list[int]) -> Tensor:
    """Returns the tokens up to and with the first that ends the sequence."""
    places = torch.isin(row_T, torch.tensor(ends, device=row_T.device, dtype=row_T.dtype)).nonzero()
    return row_T[: int(places[0]) + 1] if len(places) else row_T


def _is_sharded(module: nn.Module) -> bool:
    """Returns whether every rank must take part in every forward, also when its own sequences have ended."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return False
    if any(hasattr(p, "ds_id") or hasattr(p, "full_tensor") for p in module.parameters()):
        return True
    trainer = trainer_of(module)
    wrapper = trainer.strategy.model if trainer is not None else None
    return wrapper is not None and wrapper is not module and not isinstance(wrapper, DistributedDataParallel)
