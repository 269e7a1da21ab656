"""Features of samples on disk: computed once, found again only for exactly what they were computed from.

A folder per key holds `key.json` and shards `rows-*.safetensors`, each written under another name first and then renamed, so a crash leaves
whole shards or none. Each has a checksum of its contents: one that the disk has changed is set aside, and its rows count as missing.

Shapes: N rows, K features.
"""

import hashlib
import json
import os
import pickle
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import Optimizer
from tqdm.auto import tqdm


@dataclass(frozen=True)
class FeatureKey:
    """All that the features depend on."""

    data: str
    """Fingerprint of the samples; see `data_fingerprint`."""
    step: int
    """The model's optimizer step."""
    weights: str
    """Fingerprint of the model's parameters and buffers, and of the optimizer's state where it is used."""
    settings: str
    """What was computed, as canonical JSON."""

    @property
    def digest(self) -> str:
        """A short name, different for different keys."""
        return hashlib.blake2b(json.dumps(asdict(self), sort_keys=True).encode(), digest_size=12).hexdigest()


def feature_key(
    module: nn.Module,
    data: str,
    settings: Any,
    *,
    step: int,
    optimizers: Iterable[Optimizer] = (),
    collate: str = "",
    names: Iterable[str] | None = None,
) -> FeatureKey:
    """Returns the key of features of a model as it stands.

    Args:
        module: the model; every parameter and buffer is hashed, at about a gigabyte a second.
        data: fingerprint of the samples.
        settings: a dataclass such as `GradientSettings`, or anything JSON knows.
        step: the model's optimizer step.
        optimizers: whose state the features depend on (`preconditioner="adam"`). (default: none)
        collate: names whatever else makes the batch out of samples: tokenizer, length limit. (default: empty)
        names: of the selected parameters, where patterns choose them. (default: all)
    """
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        digest.update(f"{name}{tensor.dtype}{tuple(tensor.shape)}".encode())
        digest.update(_bytes(tensor))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            digest.update(json.dumps({k: v for k, v in group.items() if k in ("betas", "eps")}).encode())
            for parameter in group["params"]:
                for name, value in sorted(optimizer.state.get(parameter, {}).items()):
                    digest.update(name.encode() + (_bytes(value) if isinstance(value, Tensor) else repr(value).encode()))
    values = asdict(settings) if is_dataclass(settings) and not isinstance(settings, type) else settings
    described = {
        "settings": values,
        "collate": collate,
        "names": None if names is None else sorted(names),
        "module": type(module).__qualname__,
    }
    return FeatureKey(data, step, digest.hexdigest(), json.dumps(described, sort_keys=True))


def data_fingerprint(dataset: Any, progress: bool = True) -> str:
    """Returns a fingerprint of a map-style dataset: its own `_fingerprint` (Hugging Face datasets have one), else a hash of every sample.

    Args:
        dataset: map-style, with a length, whose samples are the same each time they are read.
        progress: whether to show a bar. (default: True)
    """
    own = getattr(dataset, "_fingerprint", None)
    if isinstance(own, str):
        return own
    digest = hashlib.blake2b(digest_size=16)
    for index in tqdm(range(len(dataset)), desc="data_fingerprint", disable=not progress, leave=False):
        _hash_into(digest, dataset[index])
    return digest.hexdigest()


class FeatureStore:
    """Rows of features under one key.

    Args:
        folder: of all stores; this key's own folder is made in it.
        key: what the rows are computed from. Another key is another folder, so rows are never taken for what they are not.
        dtype: rows are kept in; FP32 loses nothing, BF16 halves the disk. (default: `torch.float32`)

    Raises:
        ValueError: when the folder of this key holds another key, or one that cannot be read.
    """

    def __init__(self, folder: str | Path, key: FeatureKey, dtype: torch.dtype = torch.float32) -> None:
        self.key, self.dtype = key, dtype
        self.path = Path(folder) / key.digest
        self.path.mkdir(parents=True, exist_ok=True)
        described = {**asdict(key), "dtype": str(dtype)}
        file = self.path / "key.json"
        if not file.exists():
            _write_atomically(file, lambda temporary: temporary.write_text(json.dumps(described, indent=1)))
        try:
            found = json.loads(file.read_text())
        except ValueError as error:  # no JSON, or no text
            raise ValueError(f"{file} cannot be read ({error}). Delete {self.path}: its rows will be computed again.") from error
        if found != described:
            differing = ", ".join(
                f"{name}={found.get(name)!r} instead of {value!r}" for name, value in described.items() if found.get(name) != value
            )
            raise ValueError(
                f"{file} belongs to other features: it has {differing}. Use another folder, or delete {self.path} if it is not needed."
            )

    def append(self, indices: Sequence[int], rows_NK: Tensor) -> None:
        """Writes rows, whole or not at all.

        Args:
            indices: of the samples, one per row.
            rows_NK: their features.
        """
        if len(indices) != len(rows_NK):
            raise ValueError(f"Got {len(indices)} indices for {len(rows_NK)} rows.")
        if not len(indices):
            return
        shard = {"indices": torch.tensor(list(indices)), "rows": rows_NK.detach().cpu().to(self.dtype).contiguous()}
        metadata = {"checksum": _checksum(shard["indices"], shard["rows"])}
        file = self.path / f"rows-{min(indices):09d}-{uuid.uuid4().hex[:12]}.safetensors"
        _write_atomically(file, lambda temporary: save_file(shard, temporary, metadata))

    def load(self) -> tuple[Tensor, Tensor]:
        """Returns the indices (N,) in rising order, each once, and their rows (N, K) in FP32.

        A shard that is cut short, or whose contents do not have the checksum it was written with, is renamed to `*.damaged` with a warning
        that names it. Its rows are missing then, so `over_dataset` computes them again. The checksum costs a second for each gigabyte.
        """
        shards = []
        for file in sorted(self.path.glob("rows-*.safetensors")):
            try:
                shards.append(_read(file))
            except OSError:
                raise  # the disk, or the right to read: the shard may be whole
            except Exception as error:
                file.rename(file.with_suffix(".damaged"))
                rank_zero_warn(
                    f"{file} is damaged ({error}), so its rows are missing and will be computed again. It was renamed to `.damaged`: "
                    "look at the disk, then delete it."
                )
        if not shards:
            return torch.empty(0, dtype=torch.long), torch.empty(0, 0)
        indices, rows = torch.cat([i for i, _ in shards]), torch.cat([r for _, r in shards]).float()
        order = indices.argsort(stable=True)
        first = torch.ones_like(order, dtype=torch.bool)
        first[1:] = indices[order][1:] != indices[order][:-1]
        return indices[order][first], rows[order[first]]


def _read(file: Path) -> tuple[Tensor, Tensor]:
    with safe_open(file, "pt") as shard:
        indices, rows, written = shard.get_tensor("indices"), shard.get_tensor("rows"), (shard.metadata() or {}).get("checksum")
    if (found := _checksum(indices, rows)) != written:
        raise ValueError(f"its contents have the checksum {found}, not {written}")
    return indices, rows


def _checksum(*tensors: Tensor) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        _hash_into(digest, tensor)
    return digest.hexdigest()


def _write_atomically(file: Path, write: Any) -> None:
    temporary = file.with_name(f".{file.name}.{uuid.uuid4().hex[:8]}")
    try:
        write(temporary)
        with temporary.open("rb+") as handle:
            os.fsync(handle.fileno())
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)


def _bytes(tensor: Tensor) -> Any:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _hash_into(digest: Any, value: Any) -> None:
    """Hashes a value with its types, so that nests that print alike stay apart."""
    if isinstance(value, Tensor):
        digest.update(f"tensor{value.dtype}{tuple(value.shape)}".encode())
        digest.update(_bytes(value))
    elif isinstance(value, dict):
        digest.update(f"dict{len(value)}".encode())
        for key, item in value.items():
            _hash_into(digest, key)
            _hash_into(digest, item)
    elif isinstance(value, list | tuple):
        digest.update(f"{type(value).__name__}{len(value)}".encode())
        for item in value:
            _hash_into(digest, item)
    else:
        digest.update(pickle.dumps(value, protocol=5))
