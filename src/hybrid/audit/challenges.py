"""Work that a node cannot have prepared: seeds that come when the window opens, results checked.

A challenge is `products` matrix products of whole numbers. The seed makes A [m, k] and B [k, n];
product t is A @ B[order_t], where the seed and t make the order, so that no product follows from
another. The device answers with a fingerprint of every row of every product (the commitment); only
then does the driver choose one product, have it sent, and check it:

1. its rows have the fingerprints that were committed, and
2. it is the product, by Freivalds' method: for a random x, C x = A (B x), at the cost of three
   matrix-vector products (R. Freivalds, "Probabilistic machines can use less running time",
   IFIP 1977).

All entries of A and B are whole and in [-8, 7], so every sum is whole and at most 64 k < 2^24:
exact in float32, in TF32 with float32 accumulation and in any order. There is no tolerance: the
right answer is one bit pattern on every device, and that is why answers of all GPUs to one
common seed, and repeats of it, are compared bit by bit.

Error: with x uniform in [0, 2^20)^n a wrong product passes one check with probability of at most
2^-20 (Schwartz-Zippel over the integers), and 2^-60 in the three that are made. Who skips a share s
of the products is not caught with probability 1 - s by one challenge. The fingerprint is no
cryptographic hash; it only has to cost more to invert than the product it stands for.
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import asdict, dataclass
from typing import Any

import torch

from hybrid.audit.device import Device

_CHECKS = 3
_X_BITS = 20


@dataclass(frozen=True)
class Shape:
    """Of one challenge: A [m, k], B [k, n], and how many products of them.

    Raises:
        ValueError: a sum could reach 2^24, beyond which float32 is not exact, or one of the check
            2^53, beyond which float64 is not.
    """

    m: int
    k: int
    n: int
    products: int

    def __post_init__(self) -> None:
        if 64 * self.k >= 2**24 or 64 * self.k * self.n * 2**_X_BITS >= 2**53:
            raise ValueError(f"challenge of {self.m} x {self.k} x {self.n} is not exact")

    @property
    def work(self) -> float:
        """Floating-point operations of all products."""
        return 2.0 * self.m * self.k * self.n * self.products


def shape_for(kind: str, products: int) -> Shape:
    """A size that keeps the device busy and the driver's check cheap."""
    if kind == "cuda":
        return Shape(2048, 8192, 2048, products)
    return Shape(256, 2048, 256, products)


@dataclass(frozen=True)
class Answer:
    """What a device commits to: fingerprints [products, m], int64, as bytes."""

    fingerprints: bytes

    @property
    def digest(self) -> str:
        """One name of all of it."""
        return hashlib.sha256(self.fingerprints).hexdigest()


def _scramble(x: torch.Tensor) -> torch.Tensor:
    """A bijection of int64 in place that mixes all bits (SplitMix64's finaliser).

    Whole-number operations that wrap give the same bits on every device. Right shifts of int64 are
    arithmetic, so the sign is masked away.
    """
    for shift, odd in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        x ^= (x >> shift) & ((1 << (64 - shift)) - 1)
        x *= odd
    x ^= (x >> 31) & ((1 << 33) - 1)
    return x


def _noise(seed: int, stream: int, count: int, device: torch.device) -> torch.Tensor:
    """int64 [count], the same for the same (seed, stream) on every device."""
    start = _scramble(torch.tensor([seed ^ (stream << 40)], dtype=torch.int64))
    return _scramble(torch.arange(count, device=device) + start.to(device))


def operands(seed: int, shape: Shape, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """A [m, k] and B [k, n] of a seed: float32, whole numbers in [-8, 7]."""
    made = []
    for stream, (rows, columns) in enumerate(((shape.m, shape.k), (shape.k, shape.n))):
        octets = _noise(seed, stream, -(-rows * columns // 16), device).view(torch.uint8)
        nibbles = torch.stack((octets & 15, octets >> 4), dim=1).flatten()[: rows * columns]
        made.append(nibbles.to(torch.float32).sub_(8).view(rows, columns))
    return made[0], made[1]


def order(seed: int, t: int, shape: Shape, device: torch.device) -> torch.Tensor:
    """The order of B's rows in product t: int64 [k]."""
    return torch.sort(_noise(seed, 2 + t, shape.k, device), stable=True).indices


def product(
    device: Device, a: torch.Tensor, b: torch.Tensor, seed: int, t: int, shape: Shape
) -> torch.Tensor:
    """Product t, float32 [m, n], by the device's own matrix product."""
    return device.matmul(a, b[order(seed, t, shape, device.place)], _kind(device))


def _kind(device: Device) -> str:
    return "tf32" if device.kind == "cuda" and device.place.type == "cuda" else "fp32"


def fingerprint(c: torch.Tensor) -> torch.Tensor:
    """int64 [m] of whole numbers [m, n]: each entry is mixed with its column, then summed.

    Not linear in C, so it does not follow from A (B w).
    """
    columns = torch.arange(c.shape[1], device=c.device, dtype=torch.int64) << 32
    mixed = _scramble(c.to(torch.int64) ^ columns)
    return mixed.sum(dim=1)


def answer(device: Device, seed: int, shape: Shape) -> Answer:
    """Do the work of a challenge on a device (on the node)."""
    a, b = operands(seed, shape, device.place)
    found = [fingerprint(product(device, a, b, seed, t, shape)) for t in range(shape.products)]
    stacked = torch.stack(found).cpu()
    return Answer(stacked.numpy().tobytes())


def reveal(device: Device, seed: int, shape: Shape, t: int) -> bytes:
    """Product t in full, int32 [m, n], as bytes (on the node, after the commitment)."""
    a, b = operands(seed, shape, device.place)
    return product(device, a, b, seed, t, shape).to(torch.int32).cpu().numpy().tobytes()


def check(seed: int, shape: Shape, given: Answer, t: int, revealed: bytes) -> str | None:
    """What is wrong with a revealed product (on the driver); None when it is right."""
    expected = shape.products * shape.m * 8
    if len(given.fingerprints) != expected or len(revealed) != shape.m * shape.n * 4:
        return "an answer of the wrong size"
    committed = torch.frombuffer(bytearray(given.fingerprints), dtype=torch.int64)
    c = torch.frombuffer(bytearray(revealed), dtype=torch.int32).view(shape.m, shape.n)
    if not torch.equal(fingerprint(c), committed.view(shape.products, shape.m)[t]):
        return f"product {t} is not the one that was committed to"
    if int(c.abs().max()) > 64 * shape.k:
        return f"product {t} has entries that no sum can reach"
    here = torch.device("cpu")
    a, b = (x.to(torch.float64) for x in operands(seed, shape, here))
    b = b[order(seed, t, shape, here)]
    # The driver's entropy, so that the node cannot know x. All sums are whole and below 2^53.
    words = torch.frombuffer(
        bytearray(secrets.token_bytes(4 * shape.n * _CHECKS)), dtype=torch.int32
    )
    x = (words & ((1 << _X_BITS) - 1)).to(torch.float64).view(shape.n, _CHECKS)
    if not torch.equal(c.to(torch.float64) @ x, a @ (b @ x)):
        return f"product {t} is wrong (Freivalds)"
    return None


def new_seed() -> int:
    """A seed of the system's entropy, 38 bits above which streams are numbered."""
    return secrets.randbits(38)


def as_json(shape: Shape) -> dict[str, Any]:
    """A shape as plain data."""
    return asdict(shape)
