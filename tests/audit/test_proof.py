"""Clouds' identity documents: fetched from a real metadata server, checked with real keys."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from cryptography.hazmat.primitives.serialization import pkcs7
from cryptography.x509.oid import NameOID
from honest import claims_of, node_reading, sku
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid.audit import pkcs7 as ours
from hybrid.audit.facts import Facts
from hybrid.audit.proof import Trust, fetch, verify
from hybrid.audit.reading import Reading
from hybrid.audit.specs import load_specs
from hybrid.audit.verdict import judge
from hybrid.errors import DataError

NONCE = "0123456789"
NOW = datetime.now(UTC)
AWS = json.dumps(
    {"accountId": "123456789012", "instanceId": "i-0abc", "instanceType": "p4d.24xlarge",
     "region": "us-east-1"}, indent=2,
)  # fmt: skip


def new_key() -> rsa.RSAPrivateKey:
    return rsa.generate_private_key(public_exponent=65537, key_size=2048)


def certificate(
    name: str, key: rsa.RSAPrivateKey, issuer: str, by: rsa.RSAPrivateKey, *, ca: bool = False,
    days: int = 30,
) -> x509.Certificate:  # fmt: skip
    def named(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

    return (
        x509.CertificateBuilder()
        .subject_name(named(name))
        .issuer_name(named(issuer))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(NOW - timedelta(days=400))
        .not_valid_after(NOW + timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
        .sign(by, hashes.SHA256())
    )


class Keys:
    """A cloud's keys: a root, a signer below it, and somebody else's."""

    def __init__(self) -> None:
        self.root_key, self.key, self.stranger = new_key(), new_key(), new_key()
        self.root = certificate("Root", self.root_key, "Root", self.root_key, ca=True)
        self.signer = certificate("eastus.metadata.azure.com", self.key, "Root", self.root_key)
        self.late = certificate("metadata.azure.com", self.key, "Root", self.root_key, days=-1)
        self.other = certificate("evil.example.com", self.key, "Root", self.root_key)


KEYS = Keys()


def b64url(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def signed(data: bytes, key: rsa.RSAPrivateKey) -> bytes:
    return key.sign(data, padding.PKCS1v15(), hashes.SHA256())


def token(audience: str, *, key: rsa.RSAPrivateKey = KEYS.key, **changed: Any) -> str:
    claims = {
        "aud": audience, "exp": NOW.timestamp() + 3600,
        "google": {"compute_engine": {"instance_id": "42", "zone": "us-central1-a",
                                      "project_id": "p"}},
    } | changed  # fmt: skip
    head = b64url(json.dumps({"alg": "RS256", "kid": "k1"}).encode())
    body = b64url(json.dumps(claims).encode())
    return f"{head}.{body}.{b64url(signed(f'{head}.{body}'.encode(), key))}"


def attested(
    nonce: str, *, cert: x509.Certificate = KEYS.signer, key: rsa.RSAPrivateKey = KEYS.key,
    hours: int = 6, raw: bool = False,
) -> str:  # fmt: skip
    content = {
        "nonce": nonce, "vmId": "vm-1", "subscriptionId": "sub-1",
        "timeStamp": {"expiresOn": (NOW + timedelta(hours=hours)).strftime(
            "%m/%d/%y %H:%M:%S -0000")},
    }  # fmt: skip
    options = [pkcs7.PKCS7Options.Binary]
    if raw:
        options.append(pkcs7.PKCS7Options.NoAttributes)
    der = (
        pkcs7.PKCS7SignatureBuilder()
        .set_data(json.dumps(content).encode())
        .add_signer(cert, key, hashes.SHA256())
        .sign(serialization.Encoding.DER, options)
    )
    return base64.b64encode(der).decode()


class Metadata(BaseHTTPRequestHandler):
    """A metadata service; `cloud` says whose."""

    cloud = ""

    def answer(self, text: str, status: int = 200) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def do_PUT(self) -> None:
        known = self.cloud == "aws" and "X-aws-ec2-metadata-token-ttl-seconds" in self.headers
        self.answer("session-token" if known else "", 200 if known else 404)

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        query = {k: v[0] for k, v in parse_qs(url.query).items()}
        if self.cloud == "aws" and self.headers.get("X-aws-ec2-metadata-token") == "session-token":
            part = url.path.rpartition("/")[2]
            sign = base64.b64encode(signed(AWS.encode(), KEYS.key)).decode()
            return self.answer({"document": AWS, "signature": sign}[part])
        if self.cloud == "gcp" and self.headers.get("Metadata-Flavor") == "Google":
            return self.answer(token(query["audience"]))
        if self.cloud == "azure" and self.headers.get("Metadata") == "true":
            return self.answer(json.dumps({"encoding": "pkcs7",
                                           "signature": attested(query["nonce"])}))  # fmt: skip
        if self.cloud == "captive":
            return self.answer("<html>please log in</html>" * 9000)
        return self.answer("", 404)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Metadata)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def trust(tmp_path: Path) -> Trust:
    pem = serialization.Encoding.PEM
    aws, azure, gcp = (tmp_path / n for n in ("aws.pem", "azure.pem", "gcp.json"))
    own = certificate("AWS", KEYS.key, "AWS", KEYS.key)
    aws.write_bytes(own.public_bytes(pem))
    azure.write_bytes(KEYS.root.public_bytes(pem))
    numbers = KEYS.key.public_key().public_numbers()
    n, e = (b64url(x.to_bytes((x.bit_length() + 7) // 8)) for x in (numbers.n, numbers.e))
    gcp.write_text(json.dumps({"keys": [{"kid": "k1", "kty": "RSA", "n": n, "e": e}]}))
    found = Trust(aws=aws, gcp=gcp, azure=azure)
    found.check()
    return found


def values(readings: list[Reading]) -> dict[str, Any]:
    return {r.name.removeprefix("proof."): r.value for r in readings}


@pytest.mark.parametrize(
    ("cloud", "fields"),
    [
        ("aws", {"instance_type": "p4d.24xlarge", "region": "us-east-1"}),
        ("gcp", {"instance_id": "42", "region": "us-central1-a"}),
        ("azure", {"instance_id": "vm-1", "account": "sub-1"}),
    ],
)
def test_a_clouds_document_is_fetched_and_checked(
    cloud: str, fields: dict[str, str], endpoint: str, trust: Trust,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(Metadata, "cloud", cloud)
    proof = fetch(NONCE, endpoint=endpoint)
    readings = verify(proof, trust, NONCE)
    found = values(readings)
    assert (found["cloud"], found["verified"]) == (cloud, True)
    assert fields.items() <= found.items()
    assert not any(r.fakeable for r in readings)
    unchecked = values(verify(proof, Trust(), NONCE))
    assert unchecked["cloud"] == cloud and unchecked["verified"] is None
    assert all(r.fakeable for r in verify(proof, Trust(), NONCE) if r.name == "proof.instance_id")
    if cloud != "aws":  # AWS signs no nonce: docs/audit.md says so
        [verified] = [r for r in verify(proof, trust, "9" * 10) if r.name == "proof.verified"]
        assert verified.value is False
        assert "not made for this audit" in verified.detail["why"]


@pytest.mark.parametrize("cloud", ["", "captive"])
def test_no_document_is_noted_as_absent(
    cloud: str, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Metadata, "cloud", cloud)
    assert fetch(NONCE, endpoint=endpoint) == {}
    [asked] = verify({}, Trust(), NONCE)
    node = [asked, node_reading("claimed.cloud", "aws"), *claims_of(sku("A10G"))]
    verdict = judge(node, load_specs())
    assert [(f.kind, f.severity) for f in verdict.findings] == [("proof-absent", "note")]
    elsewhere = judge([asked, *claims_of(sku("A10G"))], load_specs())
    assert elsewhere.findings == (), "who claims no cloud owes no document"


def test_nobody_answers(tmp_path: Path) -> None:
    assert fetch(NONCE, endpoint="http://127.0.0.1:9", timeout_s=0.5) == {}


def forged() -> dict[str, dict[str, Any]]:
    """Documents that do not hold, by what is wrong with them."""
    sign = base64.b64encode(signed(AWS.encode(), KEYS.key)).decode()
    bigger = AWS.replace("p4d.24xlarge", "p5.48xlarge")
    aud = f"hybrid-{NONCE}"
    head, body, tail = token(aud).split(".")
    other = token(aud, google={"compute_engine": {"instance_id": "43"}}).split(".")[1]
    none = b64url(json.dumps({"alg": "none", "kid": "k1"}).encode())
    der = bytearray(base64.b64decode(attested(NONCE)))
    at = der.index(b"vm-1")
    der[at : at + 4] = b"vm-2"
    return {
        "aws type changed": {"cloud": "aws", "document": bigger, "signature": sign},
        "aws signature of another": {
            "cloud": "aws", "document": AWS,
            "signature": base64.b64encode(signed(AWS.encode(), KEYS.stranger)).decode(),
        },
        "aws no base64": {"cloud": "aws", "document": AWS, "signature": "!"},
        "aws no json": {"cloud": "aws", "document": "[", "signature": sign},
        "aws a list": {"cloud": "aws", "document": "[]", "signature": sign},
        "aws numbers": {"cloud": "aws", "document": 1, "signature": 2},
        "aws deep": {"cloud": "aws", "document": "[" * 100_000, "signature": sign},
        "aws no signature": {"cloud": "aws", "document": AWS},
        "gcp claims changed": {"cloud": "gcp", "token": f"{head}.{other}.{tail}"},
        "gcp key of another": {"cloud": "gcp", "token": token(aud, key=KEYS.stranger)},
        "gcp expired": {"cloud": "gcp", "token": token(aud, exp=NOW.timestamp() - 1)},
        "gcp alg none": {"cloud": "gcp", "token": f"{none}.{body}."},
        "gcp two parts": {"cloud": "gcp", "token": f"{head}.{body}"},
        "gcp no machine": {"cloud": "gcp", "token": token(aud, google={})},
        "azure content changed": {"cloud": "azure", "signature": base64.b64encode(der).decode()},
        "azure key of another": {
            "cloud": "azure", "signature": attested(NONCE, key=KEYS.key, cert=KEYS.other),
        },
        "azure expired": {"cloud": "azure", "signature": attested(NONCE, hours=-1)},
        "azure certificate expired": {"cloud": "azure", "signature": attested(NONCE,
                                                                              cert=KEYS.late)},
        "azure own root": {
            "cloud": "azure",
            "signature": attested(
                NONCE, key=KEYS.stranger,
                cert=certificate("metadata.azure.com", KEYS.stranger, "Root", KEYS.stranger),
            ),
        },
        "azure no der": {"cloud": "azure", "signature": "AAAA"},
    }  # fmt: skip


FORGED = forged()


@pytest.mark.parametrize("what", FORGED)
def test_a_forged_document_contradicts(what: str, trust: Trust) -> None:
    readings = verify(FORGED[what], trust, NONCE)
    assert values(readings)["verified"] is False, what
    verdict = judge([*readings, *claims_of(sku("A10G"))], load_specs())
    assert verdict.identity == "contradicted"
    [found] = [f for f in verdict.findings if f.kind == "proof-invalid"]
    assert "proof.verified" in {r.name for r in found.readings}


def test_a_document_without_signed_attributes_holds_too(trust: Trust) -> None:
    proof = {"cloud": "azure", "signature": attested(NONCE, raw=True)}
    assert values(verify(proof, trust, NONCE))["verified"] is True


def test_gpus_that_the_signed_machine_does_not_have(trust: Trust) -> None:
    sign = base64.b64encode(signed(AWS.encode(), KEYS.key)).decode()
    readings = verify({"cloud": "aws", "document": AWS, "signature": sign}, trust, NONCE)
    right = judge([*readings, *claims_of(sku("A100-SXM4-40GB"))], load_specs())
    assert [f.kind for f in right.findings] == []
    wrong = judge([*readings, *claims_of(sku("GeForce RTX 3090"))], load_specs())
    [found] = [f for f in wrong.findings if f.kind == "proof-against-name"]
    assert {r.name for r in found.readings} == {"proof.instance_type", "claimed.name"}


@pytest.mark.parametrize("field", ["aws", "gcp", "azure"])
@pytest.mark.parametrize("content", [None, b"", b"{}", b"-----BEGIN CERTIFICATE-----"])
def test_a_wrong_file_of_keys_is_an_error_that_names_it(
    field: str, content: bytes | None, tmp_path: Path
) -> None:
    path = tmp_path / "keys"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match="keys"):
        Trust(**{field: path}).check()


ATTESTED = attested(NONCE)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_damaged_der_is_refused_or_does_not_hold(data: st.DataObject) -> None:
    start = base64.b64decode(ATTESTED)
    raw = bytearray(start)
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(raw[: data.draw(st.integers(0, len(raw)))])
    for damaged in (bytes(raw), cut):
        try:
            document = ours.parse(damaged)
        except DataError:
            continue
        assert ours.check(document, [KEYS.root], NOW) is not None or (
            document.content == ours.parse(start).content
        )


def test_facts_of_a_proof_without_gpus_are_none() -> None:
    assert Facts(verify({}, Trust(), NONCE)).gpus == []
