"""Functions by name: what the library builds in, and what users add in their own modules.

A registry is plain data of one process. The shell ships the user part to other processes:
`export_user_entries` here, `import_user_entries` there.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import logging
import pickle
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, Literal, TypeVar

import cloudpickle

from skyrl.errors import ConfigError

logger = logging.getLogger(__name__)

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
TraitsT = TypeVar("TraitsT")

_INSTALL_DIRS = frozenset({"site-packages", "dist-packages"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry(Generic[FunctionT, TraitsT]):
    """One registration."""

    function: FunctionT
    """What the name stands for."""
    traits: TraitsT
    """What callers must know before they call it."""
    origin: Literal["builtin", "user", "shipped"]
    """Part of the library, registered in this process, or received from another one."""
    replaceable: bool = False
    """A built-in that a user's registration may replace without unregistering it first."""


class Registry(Generic[FunctionT, TraitsT]):
    """Functions of one kind by name.

    A function that is defined inside the package `home` is built in; any other is the user's. `check` gets each name
    and function, and raises ConfigError for one that could not be called as its kind is. Within a
    process a name is registered once, with two exceptions: a user's function replaces a built-in that is
    marked replaceable, and a local registration replaces one that another process shipped (the same
    decorator ran there, too).

    Example: `losses = Registry("policy loss", home="skyrl.algorithms", default_traits=LossTraits())`.
    """

    def __init__(
        self,
        kind: str,
        *,
        home: str,
        default_traits: TraitsT,
        check: Callable[[str, Callable[..., Any]], None] | None = None,
    ) -> None:
        self.kind = kind
        self._check = check
        self._home = home
        self._default_traits = default_traits
        self._entries: dict[str, Entry[FunctionT, TraitsT]] = {}
        self._builtins: dict[str, Entry[FunctionT, TraitsT]] = {}

    def register(
        self, name: str | Enum, function: FunctionT, *, traits: TraitsT | None = None, replaceable: bool = False
    ) -> None:
        """Make `function` known as `name`.

        Args:
            name: A string, or an enum member that stands for its value.
            function: Called with keywords; see the contract of its kind.
            traits: None takes the kind's defaults.
            replaceable: For built-ins only: upstream does not know the name, so user code may bring its own.

        Raises:
            ValueError: The name is taken.
            ConfigError: The name is no text, or the function is none that returns its result when it is called.
        """
        key = require_name(self.kind, name)
        _require_plain_function(f"{self.kind} {key!r}", function)
        if self._check is not None:
            self._check(key, function)
        builtin = self._defines(key, function)
        present = self._entries.get(key)
        if present is not None:
            self._check_replace(key, present, builtin)
        entry = Entry(
            function=function,
            traits=self._default_traits if traits is None else traits,
            origin="builtin" if builtin else "user",
            replaceable=replaceable,
        )
        self._entries[key] = entry
        if builtin:
            self._builtins[key] = entry

    def _defines(self, key: str, function: FunctionT) -> bool:
        """Tell a built-in from a user's function: also from a user's wrapper of one, and from another name for one."""
        if not _is_within(_module_name(function), self._home) or inspect.unwrap(function) is not function:
            return False
        return all(entry.function is not function or name == key for name, entry in self._builtins.items())

    def is_built_in(self, name: str | Enum) -> bool:
        """Whether the name stands for the library's own function; raises like `get`."""
        return self._entry(name).origin == "builtin"

    def _check_replace(self, key: str, present: Entry[FunctionT, TraitsT], builtin: bool) -> None:
        if builtin or not (present.replaceable or present.origin == "shipped"):
            raise ValueError(f"{self.kind} {key!r} is already registered; unregister it first or choose another name")
        if present.origin == "builtin":
            logger.warning("The built-in %s %r is replaced by a user's function", self.kind, key)

    def get(self, name: str | Enum) -> FunctionT:
        """Return the function.

        Raises:
            ConfigError: Nobody registered the name; the text lists those that exist.
        """
        return self._entry(name).function

    def traits(self, name: str | Enum) -> TraitsT:
        """Return what was declared at registration; raises like `get`."""
        return self._entry(name).traits

    def _entry(self, name: str | Enum) -> Entry[FunctionT, TraitsT]:
        key = require_name(self.kind, name)
        if key not in self._entries:
            near = difflib.get_close_matches(key, self._entries, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"unknown {self.kind} {key!r}.{hint} Available: {', '.join(self.list_available())}")
        return self._entries[key]

    def __contains__(self, name: str | Enum) -> bool:
        return _key(name) in self._entries

    def list_available(self) -> list[str]:
        """Return all names in alphabetical order."""
        return sorted(self._entries)

    def unregister(self, name: str | Enum) -> None:
        """Forget a name; a built-in comes back with `repopulate_registry`.

        Raises:
            ValueError: Nobody registered the name.
        """
        key = _key(name)
        if key not in self._entries:
            raise ValueError(f"{self.kind} {key!r} is not registered; available: {', '.join(self.list_available())}")
        del self._entries[key]

    def reset(self) -> None:
        """Forget all names, built-ins included. For tests."""
        self._entries.clear()

    def repopulate_registry(self) -> None:
        """Bring back the built-ins that are missing."""
        for key, entry in self._builtins.items():
            self._entries.setdefault(key, entry)

    def user_functions(self) -> dict[str, FunctionT]:
        """Return what `export_user_entries` pickles: the functions that are not built in, by name."""
        return {key: entry.function for key, entry in self._entries.items() if entry.origin != "builtin"}

    def sync_with_actor(self) -> None:
        """Complete the local registry. Upstream's name: there is no actor to ask here."""
        self.repopulate_registry()

    def export_user_entries(self) -> dict[str, bytes]:
        """Pickle what users registered, for `import_user_entries` of another process.

        Code that another process may be unable to import (a script, a module beside it) is pickled by value;
        installed packages and the library travel by reference.

        Raises:
            ConfigError: A function holds something that cannot be pickled.
        """
        entries = {key: entry for key, entry in self._entries.items() if entry.origin != "builtin"}
        with _pickle_by_value([module for entry in entries.values() for module in _user_modules(entry.function)]):
            return {key: self._dump(key, entry) for key, entry in entries.items()}

    def _dump(self, key: str, entry: Entry[FunctionT, TraitsT]) -> bytes:
        try:
            return bytes(cloudpickle.dumps((entry.function, entry.traits, entry.replaceable)))
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{self.kind} {key!r} cannot travel to the workers: {error}; move what cannot be pickled (locks, "
                "open files, clients) out of its module's globals, or install the module on every node"
            ) from error

    def import_user_entries(self, entries: dict[str, bytes]) -> None:
        """Take over what another process of this run exported; it replaces entries of the same names.

        The bytes are unpickled: pass only what came from `export_user_entries` over the run's own channels.
        """
        for key, blob in entries.items():
            function, traits, replaceable = pickle.loads(blob)
            self._entries[key] = Entry(function=function, traits=traits, origin="shipped", replaceable=replaceable)


def require_name(kind: str, name: object) -> str:
    """Return the text that a name is or stands for.

    Raises:
        ConfigError: It is no text, such as a function whose decorator lacks its parentheses.
    """
    key = name.value if isinstance(name, Enum) else name
    if isinstance(key, str) and key:
        return key
    if callable(key):
        shown = getattr(key, "__name__", repr(key))
        raise ConfigError(f'{kind}: the decorator needs a name in parentheses before {shown}, such as ("{shown}")')
    raise ConfigError(f"{kind}: a name must be a text that is not empty, got {key!r}")


def _require_plain_function(what: str, function: object) -> None:
    """Refuse what gives no result when it is called.

    Raises:
        ConfigError: It cannot be called, or its result would be a coroutine or a generator.
    """
    if not callable(function):
        raise ConfigError(f"{what} must be a function, got {function!r}")
    call = function if inspect.isroutine(function) else getattr(function, "__call__", function)  # noqa: B004
    for kind, is_kind in {
        "an async function; write it with def, without await": inspect.iscoroutinefunction,
        "a generator; return the result instead of yielding it": inspect.isgeneratorfunction,
        "an async generator; write it with def and return": inspect.isasyncgenfunction,
    }.items():
        if is_kind(function) or is_kind(call):
            raise ConfigError(f"{what} is {kind}")


def _key(name: str | Enum) -> str:
    return str(name.value) if isinstance(name, Enum) else name


def _module_name(function: Callable[..., Any]) -> str:
    module = inspect.getmodule(function)
    return module.__name__ if module is not None else ""


def _is_within(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def _user_modules(function: Callable[..., Any]) -> list[ModuleType]:
    """Return the loaded modules that share the import root of the function's module, unless it is installed."""
    while isinstance(function, functools.partial):  # its own module is that of the standard library
        function = function.func
    module = inspect.getmodule(function)
    root = _import_root(module) if module is not None else None
    if root is None or _is_install_dir(root):
        return []
    return [
        other
        for name, other in list(sys.modules.items())
        if name != "__main__"  # always by value
        and isinstance(other, ModuleType)
        and other.__name__ == name
        and not _is_within(name, "skyrl")
        and (file := _source_file(other)) is not None
        and file.is_relative_to(root)
        and not _INSTALL_DIRS.intersection(file.parts)
    ]


def _source_file(module: ModuleType) -> Path | None:
    file = module.__dict__.get("__file__")
    return Path(file).absolute() if isinstance(file, str) else None


def _import_root(module: ModuleType) -> Path | None:
    """Return the directory on the path from which `module` was imported."""
    file = _source_file(module)
    if file is None:
        return None
    name = module.__spec__.name if module.__spec__ is not None else module.__name__
    if name == "__main__":
        return file.parent
    depth = name.count(".") + (file.name == "__init__.py")
    return file.parents[depth] if depth < len(file.parents) else None


def _is_install_dir(root: Path) -> bool:
    """Tell a directory of installed packages or of the standard library from one with a user's own code."""
    standard = {Path(sysconfig.get_path(key)).absolute() for key in ("stdlib", "platstdlib")}
    return bool(_INSTALL_DIRS.intersection(root.parts)) or root in standard or any(root.glob("*.dist-info"))


@contextmanager
def _pickle_by_value(modules: list[ModuleType]) -> Iterator[None]:
    """Let cloudpickle take these modules by value inside the block."""
    already = cloudpickle.list_registry_pickle_by_value()
    added = {module.__name__: module for module in modules if module.__name__ not in already}
    for module in added.values():
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in added.values():
            cloudpickle.unregister_pickle_by_value(module)
