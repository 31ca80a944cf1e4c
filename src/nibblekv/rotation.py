"""The rotation of a head vector before quantization: the only owner of signs, matrices and normalisation.

    y = R x,     R = (H_p kron B_m) diag(signs) * gain,     head_size = p * m, p a power of two

`full`: orthonormal, every output mixes the whole head. B is 1 where head_size is a power of two; else a Hadamard matrix
of order 4 * (odd part) by Paley's construction where one exists over a prime field; else the Hartley matrix of the odd
part. `block`: vLLM's transform, block-diagonal H_b (b = the largest power of two that divides head_size), unnormalised,
so that R R^T = b I. `none`: the identity.

Everything here is built in float64 on the CPU, whatever torch's default device, default dtype, autocast or inference mode
is at the first call: the matrices are cached for the process.

Sources: Paley, "On orthogonal matrices" (1933); Hartley (1942); QuaRot (arXiv 2404.00456) for rotated KV caches.
"""

from __future__ import annotations

import functools
import math
from typing import Literal

import torch

__all__ = ["RotationKind", "inverse_gain", "rotate", "rotation_factors", "rotation_matrix", "rotation_signs", "unrotate"]

RotationKind = Literal["none", "full", "block"]

# Sign of dimension d: +1 where bit d of this 512-bit constant is set. They equal the signs that vLLM draws.
_SIGN_BITS = int(
    "8a9dacb9c9a02476cd26200e3038796e9803b3591b951ddaa8a9c7cb4d6e1c33"
    "fa2043a0320b9848abafc4414aa48b816b7f5438a6443d6c808035b16573590d",
    16,
)


def rotation_signs(kind: RotationKind, head_size: int) -> torch.Tensor:
    """Return the sign vector [head_size] float64 of +1 and -1 (all +1 for `none`; repeated for every block of `block`)."""
    if kind == "none":
        return torch.ones(head_size, dtype=torch.float64, device="cpu")
    period = head_size & -head_size if kind == "block" else head_size
    signs = [1.0 if _SIGN_BITS >> (d % period) & 1 else -1.0 for d in range(head_size)]
    return torch.tensor(signs, dtype=torch.float64, device="cpu")


def rotation_factors(kind: RotationKind, head_size: int) -> tuple[int, torch.Tensor, bool]:
    """Split the mixing matrix into its Kronecker factors.

    Returns:
        p: order of the Sylvester factor (dimension d is row d // m of it and column d % m of the base).
        base: [m, m] float64; entries +1 and -1, or Hartley's cas(2 pi i j / m).
        outer: True if the Sylvester matrix is the left factor (H kron B), False if it acts inside each block (I kron H).
    """
    one = torch.ones(1, 1, dtype=torch.float64, device="cpu")
    if kind == "none":
        return 1, one, True
    power = head_size & -head_size
    odd = head_size // power
    if kind == "block":
        return power, one, False
    if odd == 1:
        return power, one, True
    with torch.device("cpu"):
        if _is_prime(4 * odd - 1):
            return power // 4, _paley_one(4 * odd - 1), True
        if _is_prime(2 * odd - 1):  # 1 mod 4, as `odd` is odd
            return power // 4, _paley_two(2 * odd - 1), True
        return power, _hartley(odd), True


@functools.cache
def rotation_matrix(kind: RotationKind, head_size: int) -> torch.Tensor:
    """Return R [head_size, head_size] float64 on the CPU, y = R x. Do not modify: it is cached."""
    # A tensor made in inference mode or under another default device would stay in the cache and break later callers.
    with torch.inference_mode(False), torch.device("cpu"):
        if kind == "none":
            return torch.eye(head_size, dtype=torch.float64)
        p, base, outer = rotation_factors(kind, head_size)
        sylvester = _sylvester(p)
        if outer:
            mixing = torch.kron(sylvester, base) / math.sqrt(head_size)
        else:
            mixing = torch.kron(torch.eye(head_size // p, dtype=torch.float64), sylvester)
        return mixing * rotation_signs(kind, head_size)


def inverse_gain(kind: RotationKind, head_size: int) -> float:
    """Return g such that x = g * R^T y: 1 for orthonormal rotations, 1 / block for `block`."""
    return 1.0 / (head_size & -head_size) if kind == "block" else 1.0


def rotate(x: torch.Tensor, kind: RotationKind) -> torch.Tensor:
    """Return R x for every row of x [..., head_size] (any float dtype), as float32.

    Computed in float64 and rounded once: autocast, TF32 and bf16 matmul settings do not reach it, and a row's bytes do not
    depend on how many rows are rotated with it (a float32 matrix product picks its kernel, hence its order, by shape).
    """
    if kind == "none":
        return x.to(torch.float32)
    return (x.to(torch.float64) @ _device_matrix(kind, x.shape[-1], x.device).T).to(torch.float32)


def unrotate(y: torch.Tensor, kind: RotationKind) -> torch.Tensor:
    """Return the inverse rotation of y [..., head_size] float32, as float32."""
    if kind == "none":
        return y
    x = y.to(torch.float64) @ _device_matrix(kind, y.shape[-1], y.device)
    return (x * inverse_gain(kind, y.shape[-1])).to(torch.float32)


@functools.cache
def _device_matrix(kind: RotationKind, head_size: int, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        return rotation_matrix(kind, head_size).to(device)


def _sylvester(order: int) -> torch.Tensor:
    h = torch.ones(1, 1, dtype=torch.float64)
    while h.shape[0] < order:
        h = torch.cat((torch.cat((h, h), 1), torch.cat((h, -h), 1)))
    return h


def _is_prime(n: int) -> bool:
    return n > 1 and all(n % k for k in range(2, math.isqrt(n) + 1))


def _jacobsthal(q: int) -> torch.Tensor:
    """Q[i, j] = chi(j - i) over GF(q), q an odd prime; chi is the quadratic character."""
    squares = {k * k % q for k in range(1, q)}
    chi = torch.tensor([0.0] + [1.0 if k in squares else -1.0 for k in range(1, q)], dtype=torch.float64)
    index = torch.arange(q)
    return chi[(index[None, :] - index[:, None]) % q]


def _paley_one(q: int) -> torch.Tensor:
    """Hadamard matrix of order q + 1, q a prime = 3 mod 4: I + [[0, 1], [-1, Q]]."""
    h = torch.ones(q + 1, q + 1, dtype=torch.float64)
    h[1:, 0] = -1.0
    h[1:, 1:] = _jacobsthal(q) + torch.eye(q, dtype=torch.float64)
    return h


def _paley_two(q: int) -> torch.Tensor:
    """Hadamard matrix of order 2 (q + 1), q a prime = 1 mod 4, from the conference matrix C = [[0, 1], [1, Q]]."""
    c = torch.ones(q + 1, q + 1, dtype=torch.float64)
    c[1:, 1:] = _jacobsthal(q)
    c[0, 0] = 0.0
    diagonal = torch.tensor([[1.0, -1.0], [-1.0, -1.0]], dtype=torch.float64)
    return torch.kron(c, _sylvester(2)) + torch.kron(torch.eye(q + 1, dtype=torch.float64), diagonal)


def _hartley(order: int) -> torch.Tensor:
    """cas(2 pi i j / order): symmetric, and orthogonal up to sqrt(order)."""
    index = torch.arange(order, dtype=torch.float64)
    angle = 2.0 * math.pi / order * (index[:, None] * index[None, :] % order)
    return torch.cos(angle) + torch.sin(angle)
