"""Addresses of shards and the keys that protect them.

Loopback sockets are plain. Any other address needs CURVE (Curve25519 encryption and authentication of both sides):
a client knows the shard's public key, and a shard serves only the client keys that it was given. `new_keys()` makes a
pair; a run makes one for its shards and one for its clients. All of it is text and converts to JSON.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any
from urllib.parse import urlsplit

import zmq

from asyncrl.errors import ReplayBufferError

_DOMAIN = "asyncrl"


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """A CURVE key pair as Z85 text (40 characters each). The secret is not shown in the repr."""

    public: str
    secret: str = field(repr=False)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> CurveKeys:
        return cls(public=value["public"], secret=value["secret"])


@dataclass(frozen=True, slots=True)
class ServerKeys:
    """What a shard needs: its own pair, and the public keys of the clients that it serves (nobody else)."""

    own: CurveKeys
    clients: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        return {"own": self.own.to_dict(), "clients": list(self.clients)}

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> ServerKeys:
        return cls(own=CurveKeys.from_dict(value["own"]), clients=tuple(value["clients"]))


@dataclass(frozen=True, slots=True)
class ShardAddress:
    """Where a shard listens, e.g. "tcp://127.0.0.1:5555", and its public key (None: plain, loopback only)."""

    endpoint: str
    public_key: str | None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> ShardAddress:
        return cls(endpoint=value["endpoint"], public_key=value["public_key"])


def new_keys() -> CurveKeys:
    """A fresh random key pair."""
    if not zmq.has("curve"):
        raise ReplayBufferError("this build of ZMQ has no CURVE; install the pyzmq wheel from PyPI")
    public, secret = zmq.curve_keypair()
    return CurveKeys(public=public.decode(), secret=secret.decode())


def check_host(host: str, *, has_keys: bool) -> None:
    """Raises ReplayBufferError unless `host` is an IP address that may be used: loopback, or any one with keys."""
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        raise ReplayBufferError(f"a buffer shard needs the IP address of one interface; got {host!r}") from None
    if ip.is_unspecified:
        raise ReplayBufferError(f"a buffer shard listens on one interface, which its clients can reach; got {host!r}")
    if not ip.is_loopback and not has_keys:
        raise ReplayBufferError(
            f"{host} is not a loopback address: buffer traffic on it needs CURVE keys (asyncrl.buffer.new_keys)"
        )


def secure_client(socket: zmq.Socket, address: ShardAddress, keys: CurveKeys | None) -> None:
    """Set up the connecting side before connect. Raises ReplayBufferError when keys are missing."""
    host = urlsplit(address.endpoint).hostname
    if not address.endpoint.startswith("tcp://") or host is None:
        raise ReplayBufferError(f'a shard endpoint looks like "tcp://127.0.0.1:5555"; got {address.endpoint!r}')
    check_host(host, has_keys=address.public_key is not None)
    socket.ipv6 = ":" in host
    if address.public_key is None:
        return
    if keys is None:
        raise ReplayBufferError(f"buffer shard {address.endpoint} needs CURVE keys: pass client_keys")
    socket.curve_serverkey = address.public_key.encode()
    socket.curve_publickey = keys.public.encode()
    socket.curve_secretkey = keys.secret.encode()


def secure_server(socket: zmq.Socket, keys: ServerKeys) -> Any:
    """Set up the binding side before bind, and start the thread that checks client keys.

    Returns the authenticator; its stop() ends the thread.
    """
    from zmq.auth.thread import ThreadAuthenticator  # imports asyncio; only shards with keys need it

    socket.zap_domain = _DOMAIN.encode()
    socket.zap_enforce_domain = True  # no authenticator, no service
    socket.curve_server = True
    socket.curve_publickey = keys.own.public.encode()
    socket.curve_secretkey = keys.own.secret.encode()
    authenticator = ThreadAuthenticator(socket.context)
    authenticator.start()
    authenticator.configure_curve_callback(domain=_DOMAIN, credentials_provider=_AllowedClients(keys.clients))
    return authenticator


class _AllowedClients:
    def __init__(self, public_keys: tuple[str, ...]) -> None:
        self._allowed = {key.encode() for key in public_keys}

    def callback(self, domain: str, key: bytes) -> bool:
        return key in self._allowed
