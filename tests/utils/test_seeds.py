"""Derived seeds are stable, distinct and survive a round trip through a checkpoint."""

import hashlib
import io
import random
import subprocess
import sys

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from skyrl.utils.seeds import derive_seed, request_seed, restore_rng_state, rng_state, seed_everything


def test_a_derived_seed_is_the_hash_of_its_parts():
    digest = hashlib.sha256(b'[42,"shuffle",3]').digest()
    assert derive_seed(42, "shuffle", 3) == int.from_bytes(digest[:8], "big") % 2**31


def test_another_process_derives_the_same_request_seed():
    code = "from skyrl.utils.seeds import request_seed; print(request_seed(42, 'uid-7', 3, 1, 12))"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(other.stdout) == request_seed(42, "uid-7", 3, 1, 12)


def test_every_part_of_a_request_changes_its_seed():
    base = request_seed(1, "a", 0, 0, 1)
    others = [
        request_seed(2, "a", 0, 0, 1),
        request_seed(1, "b", 0, 0, 1),
        request_seed(1, "a", 1, 0, 1),
        request_seed(1, "a", 0, 1, 1),
        request_seed(1, "a", 0, 0, 2),
        request_seed(1, "a", 0, 0, None),
    ]
    assert len({base, *others}) == 7


def test_requests_of_a_large_batch_do_not_collide():
    seeds = {request_seed(0, str(uid), rep, 0, 1) for uid in range(256) for rep in range(8)}
    assert len(seeds) == 256 * 8


@given(st.integers(), st.text(), st.integers(0, 10**6), st.integers(0, 100), st.none() | st.integers(0, 10**6))
def test_request_seeds_fit_a_signed_32_bit_number(run_seed, uid, repetition, turn, step):
    assert 0 <= request_seed(run_seed, uid, repetition, turn, step) < 2**31


def draws():
    return random.random(), float(np.random.normal()), torch.rand(3).tolist()


def test_one_seed_gives_one_sequence():
    seed_everything(5)
    first = draws()
    seed_everything(5)
    assert draws() == first


def test_generator_states_come_back_from_a_weights_only_file():
    seed_everything(11)
    random.gauss(0, 1)
    np.random.normal()  # leaves a cached second normal in both states
    file = io.BytesIO()
    torch.save(rng_state(), file)
    expected = [draws() for _ in range(3)]
    file.seek(0)
    restore_rng_state(torch.load(file, weights_only=True))
    assert [draws() for _ in range(3)] == expected
