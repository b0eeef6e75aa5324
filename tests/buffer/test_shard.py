"""Hostile and broken input: every request is answered or ignored, and the shard goes on."""

from __future__ import annotations

import json
import logging
import pickle
import socket
import tempfile
from pathlib import Path

import pytest
import xxhash
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asyncrl.buffer import ReplayBuffer, ShardServer
from asyncrl.buffer.records import Entry, pack_entry
from asyncrl.buffer.schema import encode_group
from asyncrl.buffer.shard import ShardService
from asyncrl.buffer.store import GroupStore
from asyncrl.buffer.wire import pack, unpack
from asyncrl.errors import ReplayBufferError
from tests.buffer.groups import make_group


@pytest.fixture
def address():
    server = ShardServer()
    yield server.start()
    server.stop()


class Bomb:
    def __reduce__(self):
        return (pytest.fail, ("unpickled",))


PAYLOAD = encode_group(make_group(0)).message.to_pybytes()
CHECKSUM = f"{xxhash.xxh3_64_intdigest(PAYLOAD):016x}"
JUNK = f"{xxhash.xxh3_64_intdigest(b'junk'):016x}"
ENTRY = pack_entry(Entry(encode_group(make_group(0)).ref, 7, 1600, 0, 0))
ID = "0" * 32
MALFORMED = [
    ([], "empty message"),
    ([b""], "not JSON"),
    ([b"\xff\xfe\x00"], "not JSON"),
    ([pickle.dumps(Bomb())], "not JSON"),
    ([b"[" * 200_000], "not JSON"),
    ([b"[1, 2]"], "not a JSON object but list"),
    ([b'{"id": 1, "op": "stats"}'], "unknown buffer protocol version None"),
    ([b'{"wire": 99, "id": 1, "op": "stats"}'], "unknown buffer protocol version 99"),
    (pack({"op": "stats"}), "'id' must be"),
    (pack({"id": 1}), "'op' must be"),
    (pack({"id": 1, "op": "__class__"}), "unknown operation '__class__'"),
    (pack({"id": 1, "op": "append", "writer": ID}), "expected one frame after the header; got 0"),
    (pack({"id": 1, "op": "append", "writer": "me"}, [ENTRY]), "an identity is 32 hex digits; got 'me'"),
    (pack({"id": 1, "op": "append", "writer": ID}, [ENTRY[:-1]]), "a buffer record has 128 bytes; got 127"),
    (pack({"id": 1, "op": "append", "writer": ID}, [ENTRY[:-1] + b"x"]), "a buffer record is damaged"),
    (pack({"id": 1, "op": "append_messages", "checksums": [CHECKSUM], "uses": [0]}), "0 groups came with 1 checksums"),
    (pack({"id": 1, "op": "append_messages"}, [PAYLOAD]), "'checksums' must be"),
    (pack({"id": 1, "op": "grant", "writer": ID, "num_bytes": -1, "seal": -1}), "num_bytes must be"),
    (pack({"id": 1, "op": "locate"}, [b"short"]), "multiple of 16 bytes; got 5"),
    (pack({"id": 1, "op": "read"}, [bytes(16)]), "not in this shard"),
    (pack({"id": 1, "op": "offer", "num_groups": True, "policy_version": 0, "max_staleness": 0}), "must be"),
    (pack({"id": 1, "op": "lease", "lease": []}, [bytes(16)]), "'lease' must be"),
    (pack({"id": 1, "op": "snapshot_state"}), "writes no snapshot"),
]
REFUSED = [
    (pack({"id": 1, "op": "append_messages", "checksums": [7], "uses": [0]}, [PAYLOAD]), "a checksum is 16 hex digits"),
    (pack({"id": 1, "op": "append", "writer": ID}, [ENTRY]), "segment 7 of this shard is not open for this writer"),
    (
        pack({"id": 1, "op": "append_messages", "checksums": [JUNK], "uses": [0]}, [b"junk"]),
        "not an Arrow record batch message",
    ),
    (pack({"id": 1, "op": "append_messages", "checksums": [CHECKSUM], "uses": [0]}, [PAYLOAD[:-9]]), "corrupted"),
    (pack({"id": 1, "op": "append_messages", "checksums": [CHECKSUM], "uses": [-1]}, [PAYLOAD]), "a count of uses is"),
]


@pytest.fixture
def service(tmp_path: Path) -> ShardService:
    return ShardService(GroupStore(tmp_path))


@pytest.mark.parametrize(("frames", "match"), REFUSED)
def test_a_group_that_is_not_as_described_is_refused_alone(service: ShardService, frames: list, match: str):
    reply = unpack(service.handle(frames))
    assert reply.header["ok"] and match in reply.header["results"][0]
    assert service.store.stats().appended == 0


@pytest.mark.parametrize(("frames", "match"), MALFORMED)
def test_a_malformed_request_gets_an_error_reply(service: ShardService, frames: list, match: str):
    reply = unpack(service.handle(frames))
    assert reply.header["ok"] is False and match in reply.header["error"]
    assert reply.payloads == []


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.binary(max_size=40), max_size=3))
def test_random_frames_never_raise(service: ShardService, frames: list[bytes]):
    assert unpack(service.handle(frames)).header["ok"] is False


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(PAYLOAD) - 1), st.integers(0, 255)), min_size=1, max_size=8))
def test_a_damaged_group_with_a_right_checksum_is_refused_or_stored_whole(edits: list[tuple[int, int]]):
    damaged = bytearray(PAYLOAD)
    for position, value in edits:
        damaged[position] = value
    checksum = f"{xxhash.xxh3_64_intdigest(damaged):016x}"
    frames = pack({"id": 1, "op": "append_messages", "checksums": [checksum], "uses": [0]}, [bytes(damaged)])
    with tempfile.TemporaryDirectory() as directory:
        service = ShardService(GroupStore(Path(directory)))
        logging.disable(logging.ERROR)
        reply = unpack(service.handle(frames))
        logging.disable(logging.NOTSET)
        stored = reply.header["ok"] and reply.header["results"] == [True]
        assert service.store.stats().appended == int(stored)


def test_garbage_on_the_socket_does_not_stop_the_shard(address):
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.connect(address.endpoint)
        for frames, match in MALFORMED:
            if frames:
                dealer.send_multipart(frames)
                assert dealer.poll(5_000)
                assert match in json.loads(dealer.recv_multipart()[0])["error"]
    host, port = address.endpoint.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port))) as raw:
        raw.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(range(256)) * 20)
    with ReplayBuffer([address]) as buffer:
        assert buffer.append(make_group(0)) and buffer.stats().groups == 1


def test_a_bug_in_an_operation_is_answered_and_logged(service: ShardService, caplog: pytest.LogCaptureFixture):
    service.operations["stats"] = lambda message: 1 / 0  # type: ignore[assignment,return-value]
    reply = unpack(service.handle(pack({"id": 7, "op": "stats"})))
    assert reply.header["id"] == 7 and reply.header["error"] == "ZeroDivisionError: division by zero"
    assert "ZeroDivisionError" in caplog.text


def test_a_shard_is_started_once_and_stopped_as_often_as_one_likes():
    server = ShardServer()
    server.start()
    with pytest.raises(ReplayBufferError, match="started before"):
        server.start()
    server.stop()
    server.stop()
