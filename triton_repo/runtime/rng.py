"""Philox4x32-10: random numbers that are a function of (seed, counter) and of nothing else.

So a request's choices depend neither on what it is batched with nor on when it is preempted, and a device
kernel can draw the same ones. Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

_MASK = 0xFFFFFFFF


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Ten rounds over four 32-bit words with a 64-bit key."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & _MASK, (p0 >> 32) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return c0, c1, c2, c3


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1), uniform to 53 bits, for the `index`-th draw of `seed` (taken modulo 2^64)."""
    key = (seed & _MASK, (seed >> 32) & _MASK)
    high, low, _, _ = philox4x32((index & _MASK, (index >> 32) & _MASK, 0, 0), key)
    return ((high << 21) | (low >> 11)) * 2.0**-53
