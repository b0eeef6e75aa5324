"""Publishing, mapping and pulling weights."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from asyncrl import file_server
from asyncrl.buffer.keys import ServerKeys, new_keys
from asyncrl.errors import WeightSyncError
from asyncrl.weights import WeightManifest, WeightPublisher, open_weights, pull


def weights(seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {
        "embed": torch.randn(7, 5).to(dtype),
        "layer.bias": torch.randn(3).to(dtype),
        "layer.weight": torch.randn(4, 9).to(dtype).t(),  # not contiguous
        "scale": torch.tensor(1.5).to(dtype),
    }


@pytest.fixture
def publisher(tmp_path: Path) -> Iterator[WeightPublisher]:
    publisher = WeightPublisher(tmp_path / "published")
    yield publisher
    publisher.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_published_is_what_is_opened(publisher: WeightPublisher, dtype: torch.dtype) -> None:
    expected = weights(dtype=dtype)
    manifest = WeightManifest.from_dict(publisher.publish(3, expected.items()).to_dict())
    opened = open_weights(manifest)
    assert list(opened) == list(expected)
    for name, tensor in opened.items():
        assert tensor.dtype == dtype
        assert torch.equal(tensor, expected[name]), name
    assert all(entry.offset % 64 == 0 for entry in manifest.tensors)
    assert os.path.getsize(manifest.path) == manifest.nbytes


def test_a_flipped_bit_is_found(publisher: WeightPublisher) -> None:
    manifest = publisher.publish(1, weights().items())
    data = bytearray(Path(manifest.path).read_bytes())
    data[manifest.tensors[1].offset] ^= 1
    Path(manifest.path).write_bytes(data)
    with pytest.raises(WeightSyncError, match="checksum"):
        open_weights(manifest)


def test_a_shortened_file_is_found(publisher: WeightPublisher) -> None:
    manifest = publisher.publish(1, weights().items())
    os.truncate(manifest.path, manifest.nbytes - 4)
    with pytest.raises(WeightSyncError, match=f"its manifest says {manifest.nbytes}"):
        open_weights(manifest)


@pytest.mark.parametrize("change", [{"shape": (8, 5)}, {"offset": 1 << 20}, {"offset": -64}, {"dtype": "int8"}])
def test_a_manifest_that_contradicts_itself_is_refused(publisher: WeightPublisher, change: dict) -> None:
    manifest = publisher.publish(1, weights().items())
    tensors = (replace(manifest.tensors[0], **change), *manifest.tensors[1:])
    with pytest.raises(WeightSyncError, match="embed"):
        open_weights(replace(manifest, tensors=tensors))


def test_what_is_no_manifest_is_refused() -> None:
    with pytest.raises(WeightSyncError, match="not a weight manifest"):
        WeightManifest.from_dict({"version": 1})


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_refused_by_name(publisher: WeightPublisher, value: float) -> None:
    tensors = weights()
    tensors["layer.bias"][1] = value
    with pytest.raises(WeightSyncError, match=r"layer\.bias has 1 of 3 values"):
        publisher.publish(1, tensors.items())


def test_large_finite_values_are_not_mistaken_for_infinite_ones(publisher: WeightPublisher) -> None:
    tensors = {"w": torch.full((64,), 3e38)}  # their sum overflows
    assert torch.equal(open_weights(publisher.publish(1, tensors.items()))["w"], tensors["w"])


def test_a_refused_version_leaves_nothing_and_the_one_before_stays(publisher: WeightPublisher, tmp_path: Path) -> None:
    first = publisher.publish(1, weights().items())
    with pytest.raises(WeightSyncError):
        publisher.publish(2, [("good", torch.ones(3)), ("bad", torch.tensor([math.nan]))])
    assert [p.name for p in (tmp_path / "published").iterdir()] == [Path(first.path).name]
    assert torch.equal(open_weights(first)["embed"], weights()["embed"])
    assert publisher.publish(2, weights(1).items()).version == 2


def test_versions_only_go_forward_and_names_come_once(publisher: WeightPublisher) -> None:
    publisher.publish(5, weights().items())
    with pytest.raises(WeightSyncError, match="version 5 was published after version 5"):
        publisher.publish(5, weights().items())
    with pytest.raises(WeightSyncError, match="twice"):
        publisher.publish(6, [("a", torch.ones(1)), ("a", torch.ones(1))])
    with pytest.raises(WeightSyncError, match="no tensors"):
        publisher.publish(6, [])


def test_full_shared_memory_is_an_error_that_leaves_nothing(
    publisher: WeightPublisher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(fd: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", no_space)
    with pytest.raises(WeightSyncError, match="No space left"):
        publisher.publish(1, weights().items())
    assert not list((tmp_path / "published").iterdir())


def test_old_versions_are_removed_and_what_was_opened_stays_valid(publisher: WeightPublisher, tmp_path: Path) -> None:
    manifests = [publisher.publish(1, weights(1).items())]
    opened = open_weights(manifests[0])
    manifests += [publisher.publish(v, weights(v).items()) for v in (2, 3, 4)]
    assert len(list((tmp_path / "published").iterdir())) == 2
    assert torch.equal(opened["layer.weight"], weights(1)["layer.weight"])
    with pytest.raises(WeightSyncError, match="newer version"):
        open_weights(manifests[0])
    assert torch.equal(open_weights(manifests[2])["embed"], weights(3)["embed"])


def test_writing_to_an_opened_tensor_does_not_reach_the_file(publisher: WeightPublisher) -> None:
    manifest = publisher.publish(1, weights().items())
    open_weights(manifest)["embed"].zero_()
    assert torch.equal(open_weights(manifest)["embed"], weights()["embed"])


def test_close_removes_the_files_and_the_folder(tmp_path: Path) -> None:
    publisher = WeightPublisher(tmp_path / "published")
    publisher.publish(1, weights().items())
    publisher.close()
    assert not (tmp_path / "published").exists()


def test_pull_on_the_same_host_changes_nothing(publisher: WeightPublisher, tmp_path: Path) -> None:
    manifest = publisher.publish(1, weights().items())
    assert pull(manifest, tmp_path / "pulled") is manifest
    assert not (tmp_path / "pulled").exists()


def from_elsewhere(manifest: WeightManifest) -> WeightManifest:
    """The manifest as another host sees it."""
    return replace(manifest, host="elsewhere")


def test_pull_fetches_in_chunks_and_keeps_two_versions(
    publisher: WeightPublisher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_server, "CHUNK", 100)
    for version in (1, 2, 3):
        local = pull(from_elsewhere(publisher.publish(version, weights(version).items())), tmp_path / "pulled")
        assert Path(local.path).parent == tmp_path / "pulled"
        opened = open_weights(local)
        assert all(torch.equal(opened[name], tensor) for name, tensor in weights(version).items())
    assert sorted(p.name for p in (tmp_path / "pulled").iterdir()) == ["weights-00000002.bin", "weights-00000003.bin"]


def test_pull_of_a_version_that_is_gone_says_so(publisher: WeightPublisher, tmp_path: Path) -> None:
    first = publisher.publish(1, weights().items())
    for version in (2, 3):
        publisher.publish(version, weights().items())
    with pytest.raises(WeightSyncError, match=r"does not serve weights-00000001\.bin"):
        pull(from_elsewhere(first), tmp_path / "pulled")
    assert not list((tmp_path / "pulled").iterdir())


def test_pull_of_damaged_data_is_refused_and_can_be_repeated(publisher: WeightPublisher, tmp_path: Path) -> None:
    manifest = from_elsewhere(publisher.publish(1, weights().items()))
    with pytest.raises(WeightSyncError, match="checksum"):
        pull(replace(manifest, checksum="0" * 16), tmp_path / "pulled")
    assert not list((tmp_path / "pulled").iterdir())
    assert torch.equal(open_weights(pull(manifest, tmp_path / "pulled"))["embed"], weights()["embed"])


def test_pull_without_an_answer_ends(publisher: WeightPublisher, tmp_path: Path) -> None:
    manifest = replace(from_elsewhere(publisher.publish(1, weights().items())), address="tcp://127.0.0.1:9")
    with pytest.raises(WeightSyncError, match="no answer within"):
        pull(manifest, tmp_path / "pulled", timeout_s=0.05)


@pytest.mark.parametrize("name", ["../secret.bin", "secret.txt", "/etc/passwd"])
def test_only_published_files_are_served(publisher: WeightPublisher, tmp_path: Path, name: str) -> None:
    (tmp_path / "secret.bin").write_bytes(b"secret")
    manifest = publisher.publish(1, weights().items())
    assert manifest.address is not None
    with pytest.raises(WeightSyncError, match="refused"):
        file_server.fetch(file_server.ShardAddress(manifest.address, None), name, 6, tmp_path / "stolen")


def test_serving_beyond_loopback_needs_keys(tmp_path: Path) -> None:
    with pytest.raises(WeightSyncError, match=r"10\.0\.0\.1"):
        WeightPublisher(tmp_path / "published", host="10.0.0.1")


def test_pull_with_keys_works_only_for_the_clients_that_are_known(tmp_path: Path) -> None:
    server, client, stranger = new_keys(), new_keys(), new_keys()
    publisher = WeightPublisher(tmp_path / "published", keys=ServerKeys(own=server, clients=(client.public,)))
    try:
        manifest = from_elsewhere(publisher.publish(1, weights().items()))
        with pytest.raises(WeightSyncError, match="no answer"):
            pull(manifest, tmp_path / "pulled", client_keys=stranger, timeout_s=0.3)
        with pytest.raises(WeightSyncError, match="keys"):
            pull(manifest, tmp_path / "pulled", timeout_s=0.3)
        local = pull(manifest, tmp_path / "pulled", client_keys=client)
        assert torch.equal(open_weights(local)["embed"], weights()["embed"])
    finally:
        publisher.close()
