"""Writes the page of configuration keys from the dataclasses when mkdocs builds the site."""

from __future__ import annotations

import dataclasses
import os
import typing
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from omegaconf import OmegaConf

from skyrl.config.base import field_help
from skyrl.config.root import SkyRLTrainConfig
from skyrl.config.schema import describe_type

PAGE = "reference/config.md"
INTRODUCTION = """# Configuration keys

Every key of `skyrl.train.entrypoints.main_base`, with its default and its sentence in the source. This page is
generated from the dataclasses in `skyrl/config/`. How keys are set, swept and bundled:
[Configuration](../getting-started/configuration.md).
"""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    files.append(File.generated(config, PAGE, content=config_page()))
    return files


def config_page() -> str:
    """The whole page: one table for each group, in the order of the source."""
    defaults = OmegaConf.structured(SkyRLTrainConfig)
    return "\n".join([INTRODUCTION, *_group(SkyRLTrainConfig, defaults, "")])


def _group(cls: type, defaults: Any, prefix: str) -> list[str]:
    """Lines for one dataclass and, after it, for each dataclass inside it."""
    hints = typing.get_type_hints(cls)
    texts = field_help(cls)
    rows, groups = [], []
    for field in dataclasses.fields(cls):
        key = f"{prefix}{field.name}"
        inner = _dataclass_of(hints[field.name])
        if inner is not None:
            groups.append((inner, defaults[field.name], f"{key}."))
            continue
        default = _cell(_plain_default(defaults, field.name))
        rows.append(
            f"| `{key}` | {describe_type(hints[field.name])} | `{default}` | {_cell(texts.get(field.name, ''))} |"
        )
    lines = []
    if rows:
        title = prefix.rstrip(".") or "root"
        table = ["| key | takes | default | meaning |", "|---|---|---|---|", *rows, ""]
        lines += [f"## `{title}`", "", (cls.__doc__ or "").strip().splitlines()[0], "", *table]
    for inner, inner_defaults, inner_prefix in groups:
        lines += _group(inner, inner_defaults, inner_prefix)
    return lines


def _dataclass_of(hint: Any) -> type | None:
    """The dataclass of a field typed with one, or with one or None."""
    members = [member for member in typing.get_args(hint) or (hint,) if member is not type(None)]
    return members[0] if len(members) == 1 and dataclasses.is_dataclass(members[0]) else None


def _plain_default(defaults: Any, name: str) -> str:
    value = OmegaConf.to_container(defaults, resolve=False)[name]
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return text.replace(os.path.expanduser("~"), "~")


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
