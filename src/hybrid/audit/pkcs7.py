"""Signed documents in PKCS #7 (RFC 2315, RFC 5652): enough DER to check the one signature in them.

Only what clouds sign with is understood: one signer, RSA with SHA-1 or SHA-2 (PKCS #1 v1.5), the
content inside. Certificates and arithmetic are those of the `cryptography` package.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from hybrid.errors import DataError

if TYPE_CHECKING:
    from cryptography import x509

_DIGESTS = {
    "1.3.14.3.2.26": "SHA1",
    "2.16.840.1.101.3.4.2.1": "SHA256",
    "2.16.840.1.101.3.4.2.2": "SHA384",
    "2.16.840.1.101.3.4.2.3": "SHA512",
}
_SIGNED_DATA = "1.2.840.113549.1.7.2"
_MESSAGE_DIGEST = "1.2.840.113549.1.9.4"
_SEQUENCE, _SET, _OID, _OCTETS, _INTEGER, _CONTEXT_0 = 0x30, 0x31, 0x06, 0x04, 0x02, 0xA0


@dataclass(frozen=True)
class _Der:
    """One element: its tag, its content, and all of its bytes."""

    tag: int
    content: bytes
    whole: bytes

    def children(self) -> list[_Der]:
        return list(_elements(self.content))

    @property
    def oid(self) -> str:
        first, *rest = self.content or b"\0"
        parts, value = [min(first // 40, 2), first - 40 * min(first // 40, 2)], 0
        for octet in rest:
            value = value << 7 | octet & 0x7F
            if not octet & 0x80:
                parts.append(value)
                value = 0
        return ".".join(map(str, parts))


def _elements(data: bytes) -> Iterator[_Der]:
    at = 0
    while at < len(data):
        start = at
        if at + 2 > len(data):
            raise DataError("PKCS #7: truncated")
        tag, length = data[at], data[at + 1]
        at += 2
        if length & 0x80:
            size = length & 0x7F
            if not 1 <= size <= 4 or at + size > len(data):
                raise DataError("PKCS #7: a length that DER does not allow")
            length = int.from_bytes(data[at : at + size])
            at += size
        if at + length > len(data):
            raise DataError("PKCS #7: truncated")
        yield _Der(tag, data[at : at + length], data[start : at + length])
        at += length


def _expect(elements: list[_Der], at: int, tag: int) -> _Der:
    if at >= len(elements) or elements[at].tag != tag:
        raise DataError("PKCS #7: not the structure of signed data")
    return elements[at]


@dataclass(frozen=True)
class Signed:
    """What a document holds: its content, the certificates in it, and the one signature."""

    content: bytes
    certificates: tuple[bytes, ...]
    signed: bytes
    digest: str
    content_digest: bytes | None
    signature: bytes
    serial: int


def parse(data: bytes) -> Signed:
    """Take a DER SignedData apart.

    Raises:
        DataError: it is none, or none of the kind that is understood.
    """
    outer = _expect(list(_elements(data)), 0, _SEQUENCE).children()
    if _expect(outer, 0, _OID).oid != _SIGNED_DATA:
        raise DataError("PKCS #7: not signed data")
    inside = _expect(_expect(outer, 1, _CONTEXT_0).children(), 0, _SEQUENCE).children()
    encapsulated = _expect(inside, 2, _SEQUENCE).children()
    octets = _expect(_expect(encapsulated, 1, _CONTEXT_0).children(), 0, _OCTETS)
    certificates = next((e for e in inside[3:] if e.tag == _CONTEXT_0), None)
    signers = _expect([inside[-1]], 0, _SET).children()
    if len(signers) != 1:
        raise DataError(f"PKCS #7: {len(signers)} signers; one is understood")
    signer = _expect(signers, 0, _SEQUENCE).children()
    issuer = _expect(signer, 1, _SEQUENCE).children()
    serial = int.from_bytes(_expect(issuer, 1, _INTEGER).content, signed=True)
    algorithm = _expect(_expect(signer, 2, _SEQUENCE).children(), 0, _OID).oid
    digest = _DIGESTS.get(algorithm)
    if digest is None:
        raise DataError(f"PKCS #7: digest {algorithm} is not understood")
    at, signed, content_digest = 3, octets.content, None
    if len(signer) > 3 and signer[3].tag == _CONTEXT_0:
        # Signed as a SET, whatever tag it is sent with (RFC 5652, 5.4).
        signed = bytes([_SET]) + signer[3].whole[1:]
        for attribute in signer[3].children():
            pair = attribute.children()
            if _expect(pair, 0, _OID).oid == _MESSAGE_DIGEST:
                content_digest = _expect(_expect(pair, 1, _SET).children(), 0, _OCTETS).content
        if content_digest is None:
            raise DataError("PKCS #7: signed attributes without a digest of the content")
        at = 4
    return Signed(
        content=octets.content,
        certificates=tuple(c.whole for c in certificates.children()) if certificates else (),
        signed=signed,
        digest=digest,
        content_digest=content_digest,
        signature=_expect(signer, at + 1, _OCTETS).content,
        serial=serial,
    )


def check(document: Signed, trusted: list[x509.Certificate], now: datetime) -> str | None:
    """Why a document's signature does not hold; None when it does.

    Args:
        document: parsed.
        trusted: certificates to believe: the signer's own, or those above it.
        now: aware; certificates must be valid then.
    """
    from cryptography import x509
    from cryptography.exceptions import UnsupportedAlgorithm

    unreadable = (
        ValueError, TypeError, UnsupportedAlgorithm, x509.DuplicateExtension, x509.InvalidVersion,
        x509.UnsupportedGeneralNameType,
    )  # fmt: skip
    try:
        brought = [x509.load_der_x509_certificate(c) for c in document.certificates]
        return _check(document, brought, trusted, now)
    except unreadable as e:  # the node brings them, and certificates are parsed as they are asked
        return f"a certificate in it cannot be read: {e}"


def _check(
    document: Signed,
    brought: list[x509.Certificate],
    trusted: list[x509.Certificate],
    now: datetime,
) -> str | None:
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import padding, rsa

    signer = next((c for c in (*trusted, *brought) if c.serial_number == document.serial), None)
    if signer is None:
        return "the signer's certificate is neither in it nor among the trusted ones"
    kind = getattr(hashes, document.digest)()
    if document.content_digest is not None:
        digest = hashes.Hash(kind)
        digest.update(document.content)
        if digest.finalize() != document.content_digest:
            return "the content is not what was signed"
    key = signer.public_key()
    if not isinstance(key, rsa.RSAPublicKey):
        return "it is not signed with RSA"
    try:
        key.verify(document.signature, document.signed, padding.PKCS1v15(), kind)
    except InvalidSignature:
        return "the signature is not the signer's"
    return _chain(signer, brought, trusted, now)


def _chain(
    signer: x509.Certificate,
    brought: list[x509.Certificate],
    trusted: list[x509.Certificate],
    now: datetime,
) -> str | None:
    """Walk from the signer to a trusted certificate, each valid now and issued by the next."""
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature

    here = signer
    for _ in range(8):
        if not here.not_valid_before_utc <= now <= here.not_valid_after_utc:
            return f"the certificate {here.subject.rfc4514_string()} is not valid now"
        if here in trusted:
            return None
        for above in (*trusted, *brought):
            try:
                here.verify_directly_issued_by(above)
                authority = above.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
            except (ValueError, TypeError, InvalidSignature, x509.ExtensionNotFound):
                continue
            if authority and above != here:
                here = above
                break
        else:
            return f"nobody who is trusted issued {here.subject.rfc4514_string()}"
    return "a chain of certificates without an end"
