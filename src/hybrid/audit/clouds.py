"""What a cloud's document says about the GPUs, and what follows where it does not fit."""

from __future__ import annotations

from collections.abc import Iterator

from hybrid.audit.facts import Facts, finding
from hybrid.audit.reading import Expectation, Finding, Reading

AWS_GPUS = {
    "p3": "V100-SXM2-16GB",
    "p3dn": "V100-SXM2-32GB",
    "p4d": "A100-SXM4-40GB",
    "p4de": "A100-SXM4-80GB",
    "p5": "H100",
    "p5e": "H200",
    "p5en": "H200",
    "p6-b200": "B200",
    "g4dn": "T4",
    "g5": "A10G",
    "g6": "L4",
    "gr6": "L4",
    "g6e": "L40S",
}
"""The GPU of AWS's instance families (Amazon EC2 User Guide, accelerated computing instances)."""
_VENDORS = {"amazon ec2": "aws", "google": "gcp", "microsoft corporation": "azure"}


def claimed_cloud(vendor: str) -> str | None:
    """The cloud that a machine's DMI vendor names; None for any other."""
    return _VENDORS.get(vendor.strip().lower())


def of_proof(facts: Facts) -> Iterator[Finding]:
    """Findings of the document, or of its absence where the node claims to be in a cloud."""
    claimed = facts.get("claimed.cloud")
    cloud, verified = facts.get("proof.cloud"), facts.get("proof.verified")
    asked = bool(facts.everywhere("proof.asked")) or cloud is not None
    if claimed is not None and cloud is None and asked:
        yield finding(
            "proof-absent", "identity", "note",
            f"the node claims to be in a cloud ({claimed.value}), and no signed document of it was"
            " to be had",
            [claimed],
        )  # fmt: skip
    if cloud is None:
        return
    if verified is None:
        yield finding(
            "proof-unchecked", "identity", "note",
            f"a document of {cloud.value} was not checked: there is no certificate to do it with",
            [cloud],
        )  # fmt: skip
        return
    if verified.value is False:
        yield finding(
            "proof-invalid", "identity", "contradicted",
            f"the document that should prove a machine of {cloud.value} does not hold:"
            f" {verified.detail.get('why')}",
            [verified, cloud],
        )  # fmt: skip
        return
    yield from _against_gpus(facts, cloud)


def _against_gpus(facts: Facts, cloud: Reading) -> Iterator[Finding]:
    kind = facts.get("proof.instance_type")
    if cloud.value != "aws" or kind is None:
        return
    expected = AWS_GPUS.get(str(kind.value).split(".")[0])
    for gpu in facts.gpus:
        name = facts.get("claimed.name", gpu)
        if expected is None or name is None:
            continue
        words = str(name.value).replace(" ", "-").split("-")
        if not set(expected.split("-")) <= set(words):
            yield finding(
                "proof-against-name", "identity", "contradicted",
                f"AWS signs for a {kind.value}, whose GPUs are {expected}; GPU {gpu} calls itself"
                f" {name.value}",
                [kind, name], Expectation(allowed=(expected,), source="Amazon EC2 User Guide"),
            )  # fmt: skip
