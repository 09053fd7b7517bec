"""The seller's own proof: identity documents that AWS, Google Cloud and Azure sign for a machine.

The node only fetches (`fetch`); the driver checks (`verify`), with certificates that its user got
from the cloud: a node that judged itself would prove nothing. What a document proves is that its
sender has such a machine. Google's and Azure's answer a nonce; AWS's can be relayed from another.
"""

from __future__ import annotations

import base64
import json
import re
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybrid.audit.reading import Reading, Scalar
from hybrid.errors import DataError, MissingExtra

if TYPE_CHECKING:
    import httpx
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import rsa

ENDPOINT = "http://169.254.169.254"
TIMEOUT_S = 1.0
_AZURE_SIGNER = re.compile(r"(.+\.)?metadata\.(azure\.(com|us|cn)|microsoftazure\.de)")
_MOST_BYTES = 64 << 10


@dataclass(frozen=True, kw_only=True)
class Trust:
    """Files with what to check signatures against; None: that cloud's stay unchecked.

    Attributes:
        aws: PEM of AWS's certificate for the region (docs: "AWS public certificates for instance
            identity document signatures", the RSA one).
        gcp: the JSON of https://www.googleapis.com/oauth2/v3/certs.
        azure: PEM of the roots and intermediates that Azure lists ("Azure Certificate Authority
            details").
    """

    aws: Path | None = None
    gcp: Path | None = None
    azure: Path | None = None

    def check(self) -> None:
        """Read every file once, before an audit is paid for.

        Raises:
            DataError: one is not what it should be. MissingExtra: `cryptography` is not installed.
        """
        for path in (self.aws, self.azure):
            if path is not None:
                _certificates(path)
        if self.gcp is not None:
            _keys(self.gcp)


NO_TRUST = Trust()


def fetch(nonce: str, *, endpoint: str = ENDPOINT, timeout_s: float = TIMEOUT_S) -> dict[str, str]:
    """Ask this machine's metadata service for what its cloud signs; {} when there is none.

    Args:
        nonce: ten digits of the driver's, which Google and Azure sign too.
        endpoint: of the metadata service.
        timeout_s: for each request.

    Returns:
        "cloud" and that cloud's parts, all text: aws: document, signature; gcp: token; azure:
        signature.
    """
    import httpx

    # No proxy may stand between a machine and its own metadata.
    with httpx.Client(base_url=endpoint, timeout=timeout_s, trust_env=False) as client:
        for ask in (_fetch_aws, _fetch_gcp, _fetch_azure):
            try:
                found = ask(client, nonce)
            except (httpx.ConnectError, httpx.ConnectTimeout):
                return {}  # all clouds have theirs at one address
            except (httpx.HTTPError, ValueError, AttributeError):
                continue
            if found:
                return found
    return {}


def _text(response: httpx.Response) -> str | None:
    small = len(response.content) <= _MOST_BYTES
    return response.text.strip() if response.status_code == 200 and small else None


def _fetch_aws(client: httpx.Client, nonce: str) -> dict[str, str]:
    """IMDSv2."""
    ttl = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}
    token = _text(client.put("/latest/api/token", headers=ttl))
    if token is None or not token.isascii() or not token.isprintable():
        return {}
    headers = {"X-aws-ec2-metadata-token": token}
    base = "/latest/dynamic/instance-identity"
    # Byte for byte, for it is signed so.
    document = client.get(f"{base}/document", headers=headers)
    signature = _text(client.get(f"{base}/signature", headers=headers))
    if document.status_code != 200 or signature is None:
        return {}
    return {"cloud": "aws", "document": document.text, "signature": signature}


def _fetch_gcp(client: httpx.Client, nonce: str) -> dict[str, str]:
    path = "/computeMetadata/v1/instance/service-accounts/default/identity"
    query = {"audience": f"hybrid-{nonce}", "format": "full"}
    token = _text(client.get(path, params=query, headers={"Metadata-Flavor": "Google"}))
    return {"cloud": "gcp", "token": token} if token and token.count(".") == 2 else {}


def _fetch_azure(client: httpx.Client, nonce: str) -> dict[str, str]:
    query = {"api-version": "2020-09-01", "nonce": nonce}
    path = "/metadata/attested/document"
    answer = _text(client.get(path, params=query, headers={"Metadata": "true"}))
    signature = json.loads(answer).get("signature") if answer else None
    return {"cloud": "azure", "signature": signature} if isinstance(signature, str) else {}


def verify(proof: Any, trust: Trust, nonce: str, *, now: datetime | None = None) -> list[Reading]:
    """Check what a node fetched (on the driver).

    Returns:
        `proof.asked` alone when the node has no document. Else `proof.cloud`; `proof.verified`:
        True, False with `why` in the detail, or None where there is nothing to check with; and the
        document's fields, which are not fakeable once it is verified.

    Raises:
        DataError: a file of `trust` cannot be read. MissingExtra: `cryptography` is not installed.
    """
    cloud = proof.get("cloud") if isinstance(proof, dict) else None  # a node may send anything
    if cloud not in ("aws", "gcp", "azure"):
        absent = {"absent": "no metadata service answers with a signed document"}
        return [_say("proof.asked", True, False, **absent)]
    path: Path | None = getattr(trust, cloud)
    now = now or datetime.now(UTC)
    check = {"aws": _aws, "gcp": _gcp, "azure": _azure}[cloud]
    try:
        fields, wrong = check(proof, path, nonce, now)
    except (LookupError, ValueError, TypeError, AttributeError, RecursionError, DataError) as e:
        if isinstance(e, DataError) and path is not None and str(path) in str(e):
            raise
        fields, wrong = {}, f"a document that cannot be read: {type(e).__name__}: {e}"
    verified = None if wrong is None and path is None else wrong is None
    why = wrong or ("" if verified else f"no certificate to check it with (trust.{cloud})")
    found = [
        _say("proof.cloud", cloud, verified is not True),
        _say("proof.verified", verified, False, why=why),
    ]
    return found + [
        _say(f"proof.{name}", value, verified is not True)
        for name, value in fields.items()
        if value is not None
    ]


def _say(name: str, value: Scalar, fakeable: bool, **detail: str) -> Reading:
    return Reading(
        name=name, value=value, source="cloud identity document", fakeable=fakeable, detail=detail
    )


Fields = dict[str, str | None]


def _aws(
    proof: dict[str, str], path: Path | None, nonce: str, now: datetime
) -> tuple[Fields, str | None]:
    """RSA over SHA-256 of the document, as AWS describes it ("base64-encoded signature")."""
    document = json.loads(proof["document"])
    fields: Fields = {
        "instance_type": _word(document.get("instanceType")),
        "instance_id": _word(document.get("instanceId")),
        "region": _word(document.get("region")),
        "account": _word(document.get("accountId")),
    }
    if path is None:
        return fields, None
    certificates = _certificates(path)
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import padding, rsa

    signature = base64.b64decode(proof["signature"])
    for certificate in certificates:
        key = certificate.public_key()
        if not isinstance(key, rsa.RSAPublicKey):
            continue
        try:
            key.verify(signature, proof["document"].encode(), padding.PKCS1v15(), hashes.SHA256())
        except InvalidSignature:
            continue
        return fields, None
    return fields, "the signature is not AWS's for this region"


def _gcp(
    proof: dict[str, str], path: Path | None, nonce: str, now: datetime
) -> tuple[Fields, str | None]:
    """A JSON Web Token signed with RS256 (RFC 7515), for our audience and not expired."""
    head, body, signature = proof["token"].split(".")
    header, claims = (json.loads(_b64url(part)) for part in (head, body))
    machine = claims["google"]["compute_engine"]
    fields: Fields = {
        "instance_id": _word(machine.get("instance_id")),
        "region": _word(machine.get("zone")),
        "account": _word(machine.get("project_id")),
    }
    if claims.get("aud") != f"hybrid-{nonce}":
        return fields, "the token is for another audience: it was not made for this audit"
    if not isinstance(claims.get("exp"), int | float) or claims["exp"] < now.timestamp():
        return fields, "the token has expired"
    if path is None:
        return fields, None
    if header.get("alg") != "RS256":
        return fields, f"signed with {header.get('alg')!r}, not RS256"
    keys = _keys(path)
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import padding

    public = keys.get(str(header.get("kid")))
    if public is None:
        return fields, f"no key {header.get('kid')!r} in {path.name}: fetch Google's keys anew"
    try:
        public.verify(
            _b64url(signature), f"{head}.{body}".encode(), padding.PKCS1v15(), hashes.SHA256()
        )
    except InvalidSignature:
        return fields, "the signature is not Google's"
    return fields, None


def _azure(
    proof: dict[str, str], path: Path | None, nonce: str, now: datetime
) -> tuple[Fields, str | None]:
    """A PKCS #7 document with our nonce, signed by metadata.azure.com."""
    from hybrid.audit import pkcs7

    signed = pkcs7.parse(base64.b64decode(proof["signature"], validate=True))
    content = json.loads(signed.content)
    fields: Fields = {
        "instance_id": _word(content.get("vmId")),
        "account": _word(content.get("subscriptionId")),
        "instance_type": None,
    }
    if content.get("nonce") != nonce:
        return fields, "the document has another nonce: it was not made for this audit"
    expires = time.strptime(content["timeStamp"]["expiresOn"][:17], "%m/%d/%y %H:%M:%S")
    if datetime(*expires[:6], tzinfo=UTC) < now:
        return fields, "the document has expired"
    if path is None:
        return fields, None
    if wrong := pkcs7.check(signed, _certificates(path), now):
        return fields, wrong
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    brought = [x509.load_der_x509_certificate(c) for c in signed.certificates]
    names = [
        str(n.value)
        for c in brought
        if c.serial_number == signed.serial
        for n in c.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    ]
    if not any(_AZURE_SIGNER.fullmatch(name) for name in names):
        return fields, f"signed by {', '.join(names) or 'nobody'}, not by metadata.azure.com"
    return fields, None


def _word(value: Any) -> str | None:
    return str(value)[:200] if isinstance(value, str | int) and value != "" else None


def _b64url(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


def _keys(path: Path) -> dict[str, rsa.RSAPublicKey]:
    """RSA keys by their ids, of a JSON Web Key Set (RFC 7517)."""
    _need_cryptography()
    from cryptography.hazmat.primitives.asymmetric import rsa

    try:
        found = {}
        for key in json.loads(path.read_text(encoding="utf-8"))["keys"]:
            n, e = (int.from_bytes(_b64url(key[x])) for x in ("n", "e"))
            found[str(key["kid"])] = rsa.RSAPublicNumbers(e, n).public_key()
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise DataError(f"{path}: not a JSON Web Key Set: {type(e).__name__}: {e}") from None
    return found


def _need_cryptography() -> None:
    try:
        import cryptography  # noqa: F401
    except ModuleNotFoundError:
        raise MissingExtra(
            "checking a cloud's signature needs cryptography: pip install 'hybrid[audit]'"
        ) from None


def _certificates(path: Path) -> list[x509.Certificate]:
    _need_cryptography()
    from cryptography import x509

    try:
        return list(x509.load_pem_x509_certificates(path.read_bytes()))
    except (OSError, ValueError) as e:
        raise DataError(f"{path}: no certificates in PEM: {e}") from None
