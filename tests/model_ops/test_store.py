"""The store keeps whole shards or none, and gives features back only for what they were computed from."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_megatrain.model_ops import FeatureKey, FeatureStore, GradientSettings, data_fingerprint, feature_key
from lightning_megatrain.model_ops import store as store_module

KEY = FeatureKey(data="d", step=3, weights="w", settings="{}")


def test_rows_come_back_by_index_each_once(tmp_path: Path) -> None:
    store, rows = FeatureStore(tmp_path, KEY), torch.randn(5, 8)
    assert store.load()[0].tolist() == []
    store.append([4, 1], rows[[4, 1]])
    store.append([0, 1, 3], rows[[0, 1, 3]])  # 1 again: two runs overlapped
    store.append([], rows[:0])
    indices, found = FeatureStore(tmp_path, KEY).load()
    assert indices.tolist() == [0, 1, 3, 4]
    assert torch.equal(found, rows[[0, 1, 3, 4]])
    with pytest.raises(ValueError, match="Got 1 indices for 2 rows"):
        store.append([1], rows[:2])


def test_bf16_rows_take_half_the_disk(tmp_path: Path) -> None:
    rows = torch.randn(64, 512)
    sizes = []
    for dtype in (torch.float32, torch.bfloat16):
        store = FeatureStore(tmp_path / str(dtype), KEY, dtype)
        store.append(range(64), rows)
        sizes.append(next(store.path.glob("rows-*")).stat().st_size)
        torch.testing.assert_close(store.load()[1], rows.to(dtype).float(), rtol=0, atol=0)
    assert sizes[1] < 0.52 * sizes[0]


@pytest.mark.parametrize("change", [{"data": "e"}, {"step": 4}, {"weights": "v"}, {"settings": '{"a": 1}'}])
def test_another_key_finds_nothing(change: dict[str, Any], tmp_path: Path) -> None:
    FeatureStore(tmp_path, KEY).append([0], torch.ones(1, 2))
    assert len(FeatureStore(tmp_path, replace(KEY, **change)).load()[0]) == 0
    assert len(FeatureStore(tmp_path, KEY).load()[0]) == 1


def test_a_folder_that_says_something_else_is_refused(tmp_path: Path) -> None:
    FeatureStore(tmp_path, KEY).append([0], torch.ones(1, 2))
    other = replace(KEY, step=4)
    (tmp_path / KEY.digest).rename(tmp_path / other.digest)
    with pytest.raises(ValueError, match=r"belongs to other features: it has step=3 instead of 4\. Use another folder"):
        FeatureStore(tmp_path, other)
    FeatureStore(tmp_path / "b", KEY)
    with pytest.raises(ValueError, match="dtype='torch.float32' instead of 'torch.bfloat16'"):
        FeatureStore(tmp_path / "b", KEY, torch.bfloat16)


def test_a_crash_while_writing_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FeatureStore(tmp_path, KEY)
    store.append([0], torch.ones(1, 2))

    def torn(tensors: Any, path: Path, metadata: Any) -> None:
        path.write_bytes(b"half of a shard")
        raise KeyboardInterrupt

    monkeypatch.setattr(store_module, "save_file", torn)
    with pytest.raises(KeyboardInterrupt):
        store.append([1], torch.ones(1, 2))
    assert FeatureStore(tmp_path, KEY).load()[0].tolist() == [0]
    assert sorted(p.suffix for p in store.path.iterdir()) == [".json", ".safetensors"]


@pytest.mark.parametrize("damage", ["a bit of a row", "a bit of an index", "cut short", "empty"])
def test_a_damaged_shard_is_named_and_set_aside_and_its_rows_are_missing(damage: str, tmp_path: Path) -> None:
    store, rows = FeatureStore(tmp_path, KEY), torch.randn(4, 3)
    store.append([0, 1], rows[:2])
    store.append([2, 3], rows[2:])
    kept, shard = sorted(store.path.glob("rows-*"))
    whole = shard.read_bytes()
    if "bit" in damage:
        flip(shard, whole.index((rows[2:] if "row" in damage else torch.tensor([2, 3])).numpy().tobytes()) + 5)
    else:
        shard.write_bytes(whole[:-3] if damage == "cut short" else b"")
    with pytest.warns(UserWarning, match=rf"{shard.name} is damaged .* will be computed again.*\.damaged"):
        assert store.load()[0].tolist() == [0, 1]
    assert sorted(p.name for p in store.path.glob("rows-*")) == [kept.name, shard.with_suffix(".damaged").name]
    assert store.load()[0].tolist() == [0, 1]
    store.append([2, 3], rows[2:])
    assert torch.equal(store.load()[1], rows)


def test_no_bit_of_a_shard_can_change_unseen(tmp_path: Path) -> None:
    store = FeatureStore(tmp_path, KEY)
    store.append([0, 1], torch.randn(2, 3))
    (shard,) = store.path.glob("rows-*")
    whole = shard.read_bytes()
    for place in range(len(whole)):
        flip(shard, place)
        with pytest.warns(UserWarning, match="is damaged"):
            assert len(store.load()[0]) == 0
        shard.write_bytes(whole)
    assert len(store.load()[0]) == 2


def flip(file: Path, place: int) -> None:
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)


def test_the_key_follows_weights_buffers_optimizer_settings_and_step() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(module.parameters())

    def key(**changes: Any) -> FeatureKey:
        return feature_key(module, "d", **({"settings": GradientSettings(), "step": 0, "optimizers": [optimizer]} | changes))

    first = key()
    assert key() == first
    assert key(step=1) != first
    assert key(settings=GradientSettings(seed=1)) != first
    assert key(settings=GradientSettings(parameters=("0.*",))) != first
    assert key(collate="512 tokens") != first
    with torch.no_grad():
        module[0].weight[0, 0] += 1e-7
    assert key().weights != first.weights
    second = key()
    module(torch.randn(4, 3)).sum().backward()  # moves the running statistics
    assert key().weights != second.weights
    third = key()
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.param_groups[0]["weight_decay"] = 0.0
    optimizer.step()  # moves the moments only
    assert key().weights != third.weights
    assert key(optimizers=()).weights == key(optimizers=[]).weights


def test_fingerprints_tell_datasets_apart() -> None:
    def of(*samples: Any) -> str:
        return data_fingerprint(list(samples), progress=False)

    a = {"x": torch.tensor([1, 2]), "y": "text"}
    assert of(a, a) == of(dict(a), {"x": torch.tensor([1, 2]), "y": "text"})
    different = [
        of(a), of(a, a), of({"x": torch.tensor([1, 3]), "y": "text"}), of({"x": torch.tensor([1.0, 2.0]), "y": "text"}),
        of({"x": torch.tensor([[1, 2]]), "y": "text"}), of([1, 2]), of((1, 2)), of(1, 2), of([[1], 2]), of([1, [2]]), of("12"),
    ]  # fmt: skip
    assert len(set(different)) == len(different)


def test_hugging_face_datasets_bring_their_own_fingerprint() -> None:
    from datasets import Dataset

    data = Dataset.from_dict({"a": [1, 2, 3]})
    assert data_fingerprint(data) == data._fingerprint
    assert data_fingerprint(data.select([0])) != data_fingerprint(data)
