"""Dropout bits: the published generator, a function of absolute coordinates alone, with the right rate."""

import pytest
import torch

from tileattn.philox import keep_mask, philox, threshold

# Known answers for philox4x32 with 7 rounds from the authors' Random123 distribution (kat_vectors):
# counter, key, words.
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "5f6fb709 0d893f64 4f121f81 4f730a48"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "5207ddc2 45165e59 4d8ee751 8c52f662"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "4dfccaba 190a87f0 c47362ba b6b5242a"),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_philox_gives_the_published_words(counter, key, words):
    low, high = (int(x, 16) for x in key.split())
    counter = tuple(torch.tensor([int(x, 16)]) for x in counter.split())
    got = [f"{int(word):08x}" for word in philox(low | high << 32, counter)]
    assert got == words.split()


def mask_of(columns, rows=range(6), seed=-3, p=0.4):
    batch, head = torch.arange(2)[:, None, None], torch.arange(3)[:, None]
    return keep_mask(seed, p, batch, head, torch.tensor(list(rows)), columns)


def test_bits_depend_on_absolute_coordinates_alone():
    whole = mask_of(range(50))
    for start, stop in ((0, 1), (3, 21), (16, 50), (49, 50), (7, 7)):
        assert torch.equal(mask_of(range(start, stop)), whole[..., start:stop])
    assert torch.equal(mask_of(range(50), rows=range(2, 5)), whole[..., 2:5, :])
    assert not torch.equal(mask_of(range(50), seed=4), whole)
    assert not torch.equal(whole[0], whole[1])
    assert not torch.equal(whole[:, 0], whole[:, 1])


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.999])
def test_the_rate_is_p(p):
    kept = mask_of(range(20_000), rows=range(10), p=p).double().mean().item()
    count = 2 * 3 * 10 * 20_000
    assert abs(kept - (1 - p)) <= 5 * (p * (1 - p) / count) ** 0.5
    assert 0 <= threshold(p) < 2**32
