"""Hostile and broken input: every request is answered or ignored, and the shard goes on."""

from __future__ import annotations

import json
import logging
import pickle
import socket

import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.buffer import ReplayBuffer, ShardServer
from asyncrl.buffer.schema import encode_group
from asyncrl.buffer.shard import ShardService
from asyncrl.buffer.wire import checksum, pack, unpack
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


PAYLOAD = encode_group(make_group(0)).to_pybytes()
MALFORMED = [
    ([], "empty message"),
    ([b""], "not JSON"),
    ([b"\xff\xfe\x00"], "not JSON"),
    ([pickle.dumps(Bomb())], "not JSON"),
    ([b"[" * 200_000], "not JSON"),
    ([b"[1, 2]"], "not a JSON object but list"),
    ([b'{"id": 1, "op": "stats"}'], "unknown buffer protocol version None"),
    ([b'{"wire": 99, "id": 1, "op": "stats"}'], "unknown buffer protocol version 99"),
    (pack({"op": "stats"}), "'id' must be int"),
    (pack({"id": 1}), "'op' must be str"),
    (pack({"id": 1, "op": "__class__"}), "unknown operation '__class__'"),
    (pack({"id": 1, "op": "append", "checksum": "x"}), "append takes one group; got 0 frames"),
    (pack({"id": 1, "op": "append", "checksum": "x"}, [PAYLOAD, PAYLOAD]), "got 2 frames"),
    (pack({"id": 1, "op": "append"}, [PAYLOAD]), "'checksum' must be str"),
    (pack({"id": 1, "op": "append", "checksum": checksum(b"junk")}, [b"junk"]), "not an Arrow IPC stream"),
    (pack({"id": 1, "op": "append", "checksum": checksum(PAYLOAD)}, [PAYLOAD[:-9]]), "corrupted"),
    (pack({"id": 1, "op": "read", "group_ids": ["zz"]}), "32 hex digits"),
    (pack({"id": 1, "op": "read", "group_ids": "zz"}), "'group_ids' must be list"),
    (pack({"id": 1, "op": "read", "group_ids": [None]}), "32 hex digits"),
    (pack({"id": 1, "op": "read", "group_ids": ["0" * 32]}), "not in this shard"),
    (pack({"id": 1, "op": "peek", "num_groups": True, "policy_version": 0, "max_staleness": 0}), "must be int"),
    (pack({"id": 1, "op": "lease", "lease_id": [], "group_ids": []}), "'lease_id' must be str"),
]


@pytest.mark.parametrize(("frames", "match"), MALFORMED)
def test_a_malformed_request_gets_an_error_reply(frames: list, match: str):
    reply = unpack(ShardService().handle(frames))
    assert reply.header["ok"] is False and match in reply.header["error"]
    assert reply.payloads == []


@settings(max_examples=200, deadline=None)
@given(st.lists(st.binary(max_size=40), max_size=3))
def test_random_frames_never_raise(frames: list[bytes]):
    assert unpack(ShardService().handle(frames)).header["ok"] is False


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(PAYLOAD) - 1), st.integers(0, 255)), min_size=1, max_size=8))
def test_a_damaged_group_with_a_right_checksum_is_refused_or_stored_whole(edits: list[tuple[int, int]]):
    damaged = bytearray(PAYLOAD)
    for position, value in edits:
        damaged[position] = value
    service = ShardService()
    frames = pack({"id": 1, "op": "append", "checksum": checksum(damaged)}, [bytes(damaged)])
    logging.disable(logging.ERROR)
    reply = unpack(service.handle(frames))
    logging.disable(logging.NOTSET)
    assert service.store.stats().appended == int(reply.header["ok"])


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


def test_a_bug_in_an_operation_is_answered_and_logged(caplog: pytest.LogCaptureFixture):
    service = ShardService()
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
