"""Seeds: one run seed reaches every random choice through a stable hash.

``hash()`` differs between processes, so every derived seed comes from SHA-256 over the parts.
"""

from __future__ import annotations

import hashlib
import json
import random
from typing import Any

_SEED_BITS = 31


def derive_seed(run_seed: int, *parts: str | int | None) -> int:
    """Seed of one purpose, equal in every process and on every machine.

    Args:
        run_seed: ``trainer.seed``.
        parts: what the seed is for, e.g. ``derive_seed(42, "shuffle", epoch)``; the string ``"1"`` is not the number 1.

    Returns:
        An integer in [0, 2**31), which every sampler and generator accepts.
    """
    text = json.dumps([int(run_seed), *parts], separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:8], "big") % (1 << _SEED_BITS)


def request_seed(run_seed: int, uid: str, repetition: int, turn: int, global_step: int | None) -> int:
    """Sampling seed of one generation request, in [0, 2**31).

    Args:
        run_seed: ``trainer.seed``.
        uid: the prompt's id in its dataset.
        repetition: which of the prompt's rollouts.
        turn: index of the model call within the rollout.
        global_step: training step whose batch this is; None outside training.
    """
    step = None if global_step is None else int(global_step)
    return derive_seed(run_seed, "request", str(uid), int(repetition), int(turn), step)


def seed_everything(seed: int) -> None:
    """Seed Python's, numpy's and torch's global generators (torch seeds its devices along)."""
    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed % (1 << 32))
    torch.manual_seed(seed)


def rng_state() -> dict[str, Any]:
    """State of the global CPU generators, in types that ``torch.load(weights_only=True)`` reads."""
    import numpy as np
    import torch

    version, keys, gauss = random.getstate()
    name, np_keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": (version, list(keys), gauss),
        "numpy": (
            str(name),
            [int(key) for key in np_keys],
            int(position),
            int(has_gauss),
            float(cached),
        ),
        "torch": torch.get_rng_state(),
    }


def restore_rng_state(state: dict[str, Any]) -> None:
    """Put back what `rng_state` returned.

    Raises:
        KeyError: A generator is missing from ``state``.
    """
    import numpy as np
    import torch

    version, keys, gauss = state["python"]
    name, np_keys, position, has_gauss, cached = state["numpy"]
    random.setstate((version, tuple(keys), gauss))
    np.random.set_state((name, np.array(np_keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
