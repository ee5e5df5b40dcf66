"""The declared keys of a config class: its Hydra node, what each key takes, and which key a typo meant."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, Union

from omegaconf import DictConfig, OmegaConf

_CUTOFF = 0.6
"""Least similarity (difflib) of a suggestion."""
_SINGLE = {bool: "true or false", int: "an integer", float: "a number", str: "text"}
_PLURAL = {bool: "true or false values", int: "integers", float: "numbers", str: "texts"}


def structured_node(cls: type, sources: Mapping[str, str]) -> DictConfig:
    """Build the node that Hydra merges overrides into.

    Mappings without a dataclass are open: they take any sub-key. A key of ``sources`` that has no default refers to
    its source, as in ``${trainer.policy.model.path}``.
    """
    node = OmegaConf.structured(cls)
    _open_mappings(node)
    for key, source in sources.items():
        if OmegaConf.select(node, key) is None:
            OmegaConf.update(node, key, f"${{{source}}}")
    return typing.cast(DictConfig, node)


def _open_mappings(node: DictConfig) -> None:
    if not _is_group(node):
        OmegaConf.set_struct(node, False)
        return
    for child in _children(node).values():
        _open_mappings(child)


def _is_group(node: DictConfig) -> bool:
    return dataclasses.is_dataclass(OmegaConf.get_type(node))


def _children(node: DictConfig) -> dict[str, DictConfig]:
    """Return the mappings inside a node, without resolving interpolations."""
    present = (
        key
        for key in map(str, node)
        if not OmegaConf.is_interpolation(node, key) and not OmegaConf.is_missing(node, key)
    )
    return {str(key): node[key] for key in present if isinstance(node[key], DictConfig) and node[key] is not None}


def key_paths(node: DictConfig, prefix: str = "") -> list[str]:
    """List the dotted paths of all declared keys, groups included."""
    paths = []
    children = _children(node)
    for key in map(str, node):
        paths.append(prefix + key)
        if key in children and _is_group(children[key]):
            paths += key_paths(children[key], f"{prefix}{key}.")
    return paths


def is_declared(node: DictConfig, key: str) -> bool:
    """Whether ``key`` is a declared key or lies in an open mapping."""
    *parents, name = key.split(".")
    for parent in parents:
        children = _children(node)
        if parent not in children:
            return False
        node = children[parent]
        if not _is_group(node):
            return True
    return name in node or not _is_group(node)


def suggest(node: DictConfig, key: str, cutoff: float = _CUTOFF) -> str | None:
    """Return the declared key that ``key`` most likely meant, or None.

    Corrects one segment after the other; failing that, looks for the same last segment elsewhere.

    Example:
        >>> suggest(structured_node(SkyRLTrainConfig, {}), "trainer.polcy.model.pth")
        'trainer.policy.model.path'
    """
    corrected = _correct(node, key.split("."), cutoff)
    if corrected is not None:
        return corrected
    leaf = key.rsplit(".", 1)[-1]
    same_name = [path for path in key_paths(node) if path.rsplit(".", 1)[-1] == leaf]
    return _closest(key, same_name, 0.0) or _closest(key, key_paths(node), max(cutoff, 0.8))


def _correct(node: DictConfig, segments: list[str], cutoff: float) -> str | None:
    head, *rest = segments
    if head not in node:
        close = _closest(head, map(str, node), cutoff)
        if close is None:
            return None
        head = close
    if not rest:
        return head
    child = _children(node).get(head)
    if child is None:
        return None
    if not _is_group(child):
        return ".".join([head, *rest])
    tail = _correct(child, rest, cutoff)
    return None if tail is None else f"{head}.{tail}"


def _closest(word: str, words: Iterable[str], cutoff: float) -> str | None:
    return next(iter(difflib.get_close_matches(word, list(words), n=1, cutoff=cutoff)), None)


def describe_type(hint: Any) -> str:
    """Say in words what a key of this type takes.

    Example:
        >>> describe_type(list[int] | None)
        'a list of integers, such as [a,b], or null'
    """
    if typing.get_origin(hint) in {Union, types.UnionType}:
        members = typing.get_args(hint)
        words = [describe_type(member) for member in members if member is not types.NoneType]
        return " or ".join(words) + (", or null" if types.NoneType in members else "")
    if typing.get_origin(hint) is list:
        (item,) = typing.get_args(hint)
        return f"a list of {_PLURAL.get(item, 'values')}, such as [a,b]"
    if typing.get_origin(hint) is dict:
        return "a mapping, such as {key: value}"
    if dataclasses.is_dataclass(hint):
        return "a group of settings; set its keys one by one"
    return _SINGLE.get(hint, "a value")
