"""Judge what engine workers read back against the trainer's own hashes. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from skyrl.types.weights import FingerprintPlan, TensorShard, fingerprint_key

Answers = Mapping[str, Sequence[Any]]
"""One result per worker, by server URL, as `WeightSyncClient.collective_rpc` returns them."""


@dataclass(kw_only=True)
class Proof:
    """The outcome of one comparison."""

    wrong: list[str] = field(default_factory=list)
    """Tensors that differ or that no worker of a server holds, with server and place."""
    unreadable: list[str] = field(default_factory=list)
    """Tensors that engines cannot read back, with the reason: only the wire was checked."""


def compare_fingerprints(plan: FingerprintPlan, expected: Mapping[str, str], answers: Answers) -> Proof:
    """Compare every place of every sampled tensor on every worker.

    Each server must account for each tensor, on one worker at least: read back with the right hash, or unreadable.
    """
    wrong: dict[str, list[str]] = {}
    unreadable: dict[str, str] = {}
    for url, workers in answers.items():
        seen: set[str] = set()
        for worker, records in enumerate(workers):
            for record in records:
                name = record["name"]
                seen.add(name)
                if "unreadable" in record:
                    unreadable.setdefault(name, record["unreadable"])
                    continue
                key = fingerprint_key(name, TensorShard.from_json(record["shard"]))
                if expected.get(key) != record["hash"]:
                    wrong.setdefault(name, []).append(f"{url} worker {worker} ({record['via']})")
        for name in plan.names:
            if name not in seen:
                wrong.setdefault(name, []).append(f"{url} holds no such tensor")
    return Proof(
        wrong=[f"{name} on {', '.join(places)}" for name, places in wrong.items()],
        unreadable=[f"{name} ({reason})" for name, reason in unreadable.items()],
    )


def merge_shards(answers: Answers) -> dict[str, tuple[TensorShard | None, ...]]:
    """Every distinct slice that some worker holds, by tensor name."""
    found: dict[str, dict[TensorShard | None, None]] = {}
    for workers in answers.values():
        for held in workers:
            for name, shards in held.items():
                for shard in shards:
                    found.setdefault(name, {})[TensorShard.from_json(shard)] = None
    return {name: tuple(shards) for name, shards in found.items()}
