"""One vector per sample, pooled from the last hidden states.

Shapes: B samples, T tokens, H hidden.
"""

from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_megatrain.model_ops.context import batch_size_of, device_of, on_device, precision_of, step_of, through_wrapper
from lightning_megatrain.model_ops.hugging_face import at_least_fp32, base_of, find_model, forward_arguments
from lightning_megatrain.model_ops.trace import leave_no_trace

Pooling = Literal["mean", "last_token", "position_weighted"]


def embed(module: nn.Module, batch: Any, pooling: Pooling = "mean") -> Tensor:
    """Returns one vector per sample, from one batched forward in evaluation mode that leaves no trace.

    The last hidden states of the Hugging Face model (of an encoder-decoder: its encoder's) are pooled over the tokens of the attention
    mask. The vocabulary head runs for one token at most. A module of another kind defines `compute_embeddings(self, batch) -> (B, H)`,
    which is also asked first where it exists; `pooling` is then its own affair.

    Args:
        module: a LightningModule (inside a Trainer: its device, precision and strategy are used) or any `nn.Module`.
        batch: as the module's collate function makes it, on any device.
        pooling: `"mean"`; `"last_token"`, of the attention mask, wherever the padding is; or `"position_weighted"`, the mean with weights
            1, 2, 3, ... along the sample's own tokens (ADAPT, arXiv 2605.05227: sum of t h_t over sum of t). (default: `"mean"`)

    Returns:
        Embeddings (B, H), FP32, detached, on the device that computes.

    Raises:
        ValueError: for an unknown pooling.
        TypeError: when the module neither holds a Hugging Face model nor defines the hook.
    """
    if pooling not in ("mean", "last_token", "position_weighted"):
        raise ValueError(f"pooling={pooling!r} is none of 'mean', 'last_token', 'position_weighted'.")
    hook = getattr(module, "compute_embeddings", None)
    model = None if hook is not None else find_model(module)
    if hook is None and model is None:
        raise TypeError(
            f"{type(module).__name__} holds no Hugging Face model, so it has no hidden states to pool. Define on it "
            "`compute_embeddings(self, batch)`, returning a tensor of shape (B, H)."
        )

    def call(b: Any) -> Tensor:
        with precision_of(module):
            if hook is not None:
                return hook(b).float()
            hidden_BTH = _last_hidden_states(model, b)  # type: ignore[arg-type]
        return pool(hidden_BTH, b.get("attention_mask"), pooling)

    with torch.no_grad(), leave_no_trace(module), step_of(module):
        return through_wrapper(module, call, on_device(batch, device_of(module)))


def pool(hidden_BTH: Tensor, mask_BT: Tensor | None, pooling: Pooling) -> Tensor:
    """Returns (B, H) in FP32, pooled over the tokens where `mask_BT` is not zero (None: all of them); zero for a sample without tokens."""
    hidden_BTH = at_least_fp32(hidden_BTH)
    present_BT = (torch.ones_like(hidden_BTH[..., 0]) if mask_BT is None else mask_BT != 0).float()
    position_BT = present_BT.cumsum(1) * present_BT  # 1, 2, 3, ... along the sample's tokens, on whichever side the padding is
    if pooling == "mean":
        weight_BT = present_BT
    elif pooling == "position_weighted":
        weight_BT = position_BT
    else:
        weight_BT = (position_BT == position_BT.amax(1, keepdim=True)).float() * present_BT
    weight_BT = (weight_BT / weight_BT.sum(1, keepdim=True).clamp(min=1)).to(hidden_BTH.dtype)
    with torch.autocast(hidden_BTH.device.type, enabled=False):  # of the training step that may have asked
        return torch.einsum("bt,bth->bh", weight_BT, hidden_BTH)


def _last_hidden_states(model: nn.Module, batch: Any) -> Tensor:
    """Returns (B, T, H), by running the whole model: strategies that shard gather the weights from the outermost call inwards."""
    base = base_of(model)
    backbone = base.get_encoder() if base.config.is_encoder_decoder else base.base_model
    if backbone is base:
        return _hidden(model(**forward_arguments(model, batch)))
    seen: list[Any] = []
    handles = [backbone.register_forward_hook(lambda _module, _args, output: seen.append(output))]
    if (head := base.get_output_embeddings()) is not None:
        handles.append(head.register_forward_pre_hook(_one_token))
    try:
        if base.config.is_encoder_decoder:  # its decoder must be given something; nothing of it is used
            arguments = forward_arguments(model, {k: batch[k] for k in batch if k != "labels" and not k.startswith("decoder_")})
            device = next(value.device for value in arguments.values() if isinstance(value, Tensor))
            arguments["decoder_input_ids"] = torch.zeros(batch_size_of(batch), 1, dtype=torch.long, device=device)
        else:
            arguments = forward_arguments(model, batch)
        model(**arguments)
    finally:
        for handle in handles:
            handle.remove()
    if not seen:
        raise NotImplementedError(
            f"{type(base).__name__} never called its {type(backbone).__name__}, so its hidden states were not seen. Define "
            "`compute_embeddings(self, batch)`."
        )
    return _hidden(seen[0])


def _one_token(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Leaves the head one token of each row, so that logits of all tokens never exist."""
    return (args[0][:, :1], *args[1:]) if args and args[0].dim() == 3 else args


def _hidden(output: Any) -> Tensor:
    return output.last_hidden_state if hasattr(output, "last_hidden_state") else output[0]
