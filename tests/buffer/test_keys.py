from __future__ import annotations

import json

import pytest
import zmq

from asyncrl.buffer import CurveKeys, ReplayBuffer, ServerKeys, ShardAddress, ShardServer, new_keys
from asyncrl.buffer.wire import pack
from asyncrl.errors import ReplayBufferError
from tests.buffer.groups import make_group


@pytest.fixture(scope="module")
def client_keys() -> CurveKeys:
    return new_keys()


@pytest.fixture(scope="module")
def address(client_keys: CurveKeys):
    server = ShardServer(keys=ServerKeys(own=new_keys(), clients=(client_keys.public,)))
    yield server.start()
    server.stop()


def test_the_right_keys_are_served(address: ShardAddress, client_keys: CurveKeys):
    with ReplayBuffer([address], client_keys=client_keys) as buffer:
        assert buffer.append(make_group(0))
        lease = buffer.lease(1, policy_version=0, max_staleness=0)
        assert lease is not None and buffer.read(lease.refs)[0].number == 0


def test_an_unknown_client_key_gets_nothing(address: ShardAddress):
    with (
        ReplayBuffer([address], client_keys=new_keys(), timeout_s=0.5) as buffer,
        pytest.raises(ReplayBufferError, match=r"did not answer hello.*keys and the client's"),
    ):
        buffer.append(make_group(1))


def test_a_wrong_shard_key_gets_nothing(address: ShardAddress, client_keys: CurveKeys):
    wrong = ShardAddress(address.endpoint, new_keys().public)
    with (
        ReplayBuffer([wrong], client_keys=client_keys, timeout_s=0.5) as buffer,
        pytest.raises(ReplayBufferError, match="did not answer stats"),
    ):
        buffer.stats()


def test_a_client_without_keys_gets_nothing(address: ShardAddress):
    with pytest.raises(ReplayBufferError, match="needs CURVE keys: pass client_keys"):
        ReplayBuffer([address])
    with zmq.Context() as context, context.socket(zmq.DEALER) as plain:
        plain.linger = 0
        plain.connect(address.endpoint)
        plain.send_multipart(pack({"id": 1, "op": "stats"}))
        assert not plain.poll(500)


def test_nothing_of_the_refused_clients_was_stored(address: ShardAddress, client_keys: CurveKeys):
    with ReplayBuffer([address], client_keys=client_keys) as buffer:
        assert buffer.append(make_group(1))
        assert [buffer.append(make_group(n)) for n in (1, 2)] == [False, True]


@pytest.mark.parametrize(
    ("host", "match"),
    [
        ("10.0.0.1", "10.0.0.1 is not a loopback address: .* needs CURVE keys"),
        ("0.0.0.0", "listens on one interface"),
        ("::", "listens on one interface"),
        ("example.org", "needs the IP address"),
    ],
)
def test_a_host_that_is_not_loopback_needs_keys(host: str, match: str):
    with pytest.raises(ReplayBufferError, match=match):
        ShardServer(host=host)
    endpoint = f"tcp://[{host}]:1" if ":" in host else f"tcp://{host}:1"
    with pytest.raises(ReplayBufferError, match=match):
        ReplayBuffer([ShardAddress(endpoint, None)])


def test_malformed_addresses_and_keys_are_refused(client_keys: CurveKeys):
    with pytest.raises(ReplayBufferError, match="looks like"):
        ReplayBuffer([ShardAddress("ipc:///tmp/x", None)])
    with pytest.raises(ReplayBufferError, match="cannot connect"):
        ReplayBuffer([ShardAddress("tcp://127.0.0.1:1", "short")], client_keys=client_keys)
    with pytest.raises(ReplayBufferError, match="cannot listen"):
        ShardServer(keys=ServerKeys(own=CurveKeys("a", "b"), clients=())).start()


def test_an_interface_that_is_not_here_is_reported(client_keys: CurveKeys):
    server = ShardServer(host="192.0.2.1", keys=ServerKeys(own=new_keys(), clients=(client_keys.public,)))
    with pytest.raises(ReplayBufferError, match=r"cannot listen on 192.0.2.1"):
        server.start()


def test_keys_and_addresses_are_json_and_the_secret_is_not_shown():
    keys, server = new_keys(), ServerKeys(own=new_keys(), clients=("a", "b"))
    address = ShardAddress("tcp://127.0.0.1:5555", keys.public)
    for value in (keys, server, address, ShardAddress("tcp://127.0.0.1:1", None)):
        assert type(value).from_dict(json.loads(json.dumps(value.to_dict()))) == value
    assert len(keys.public) == len(keys.secret) == 40 and keys.secret not in repr(keys)
