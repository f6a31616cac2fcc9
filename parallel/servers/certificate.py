"""
A key and a self-signed certificate for one server process, made by the standard library alone.

The certificate is Ed25519 (RFC 8032, RFC 8410). Workers trust it because the server proves by an
HMAC of the job's key that it is its own (`pdrun.parallel.servers.channel`). It lives as long as the
process, so nothing has to be stored, distributed or renewed.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import ssl
from collections.abc import Iterable
from functools import cache

_P = 2**255 - 19
_ORDER = 2**252 + 27742317777372353535851937790883648493
_D = -121665 * pow(121666, _P - 2, _P) % _P
_Point = tuple[int, int, int, int]


def make_certificate() -> tuple[bytes, bytes]:
    """Return a new private key (PKCS 8) and its certificate, both DER."""
    seed = secrets.token_bytes(32)
    key = _sequence([_integer(0), _ALGORITHM, _der(0x04, _der(0x04, seed))])
    name = _sequence([_der(0x31, _sequence([_OID_NAME, _der(0x0C, b"pdrun server")]))])
    validity = _sequence([_der(0x17, b"200101000000Z"), _der(0x18, b"99991231235959Z")])
    public = _sequence([_ALGORITHM, _der(0x03, b"\0" + _public_key(seed))])
    serial = _integer(int.from_bytes(secrets.token_bytes(15), "big") | 1)
    version = _der(0xA0, _integer(2))
    body = _sequence([version, serial, _ALGORITHM, name, validity, name, public])
    return key, _sequence([body, _ALGORITHM, _der(0x03, b"\0" + _sign(seed, body))])


def make_server_context(key: bytes, certificate: bytes) -> ssl.SSLContext:
    """Return the TLS settings of a server with this key."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    pem = ssl.DER_cert_to_PEM_cert(certificate)
    private = ssl.DER_cert_to_PEM_cert(key).replace("CERTIFICATE", "PRIVATE KEY")
    handle = os.memfd_create("pdrun-key", os.MFD_CLOEXEC)
    try:
        os.write(handle, (private + pem).encode())
        context.load_cert_chain(f"/proc/self/fd/{handle}")
    finally:
        os.close(handle)
    return context


def make_client_context(certificate: bytes) -> ssl.SSLContext:
    """Return the TLS settings of a worker that trusts this certificate and no other."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the certificate itself is known, not only its name
    context.load_verify_locations(cadata=certificate)
    return context


# ---- DER --------------------------------------------------------------------


def _der(tag: int, data: bytes) -> bytes:
    if len(data) < 0x80:
        return bytes([tag, len(data)]) + data
    size = len(data).to_bytes((len(data).bit_length() + 7) // 8, "big")
    return bytes([tag, 0x80 | len(size)]) + size + data


def _sequence(parts: Iterable[bytes]) -> bytes:
    return _der(0x30, b"".join(parts))


def _integer(value: int) -> bytes:
    return _der(0x02, value.to_bytes(value.bit_length() // 8 + 1, "big"))


_ALGORITHM = _sequence([_der(0x06, bytes([0x2B, 0x65, 0x70]))])
"""Ed25519."""
_OID_NAME = _der(0x06, bytes([0x55, 0x04, 0x03]))
"""commonName."""


# ---- Ed25519, RFC 8032 section 5.1 ------------------------------------------


def _add_points(one: _Point, other: _Point) -> _Point:
    a = (one[1] - one[0]) * (other[1] - other[0]) % _P
    b = (one[1] + one[0]) * (other[1] + other[0]) % _P
    c = 2 * one[3] * other[3] * _D % _P
    d = 2 * one[2] * other[2] % _P
    e, f, g, h = b - a, d - c, d + c, b + a
    return e * f % _P, g * h % _P, f * g % _P, e * h % _P


@cache
def _base_point() -> _Point:
    y = 4 * pow(5, _P - 2, _P) % _P
    square = (y * y - 1) * pow(_D * y * y + 1, _P - 2, _P)
    x = pow(square, (_P + 3) // 8, _P)
    if (x * x - square) % _P:
        x = x * pow(2, (_P - 1) // 4, _P) % _P
    x = x if x % 2 == 0 else _P - x
    return x, y, 1, x * y % _P


def _multiply_base(number: int) -> bytes:
    """Return a multiple of the base point, compressed."""
    total: _Point = (0, 1, 1, 0)
    point = _base_point()
    while number:
        if number & 1:
            total = _add_points(total, point)
        point = _add_points(point, point)
        number >>= 1
    inverse = pow(total[2], _P - 2, _P)
    x, y = total[0] * inverse % _P, total[1] * inverse % _P
    return (y | (x & 1) << 255).to_bytes(32, "little")


def _secret_scalar(seed: bytes) -> tuple[int, bytes]:
    digest = hashlib.sha512(seed).digest()
    scalar = int.from_bytes(digest[:32], "little")
    return (scalar & ((1 << 254) - 8)) | (1 << 254), digest[32:]


def _public_key(seed: bytes) -> bytes:
    return _multiply_base(_secret_scalar(seed)[0])


def _hash_number(data: bytes) -> int:
    return int.from_bytes(hashlib.sha512(data).digest(), "little") % _ORDER


def _sign(seed: bytes, message: bytes) -> bytes:
    scalar, prefix = _secret_scalar(seed)
    nonce = _hash_number(prefix + message)
    point = _multiply_base(nonce)
    check = _hash_number(point + _multiply_base(scalar) + message)
    return point + ((nonce + check * scalar) % _ORDER).to_bytes(32, "little")
