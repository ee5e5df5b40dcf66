"""Methods that an agent may call, and groups of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any


class tool:
    """Decorator that marks a method of a `ToolGroup` as a tool.

    On the class the attribute is this descriptor, with the function in `func` and its name in `name`; on an
    instance it is the bound method, signature and docstring included.
    """

    def __init__(self, func: Callable[..., Any]) -> None:
        self.func = func
        self.name = func.__name__
        self.__doc__ = func.__doc__
        self.__wrapped__ = func  # `inspect.signature` follows it

    def __get__(self, instance: object | None, owner: type | None = None) -> Any:
        return self if instance is None else MethodType(self.func, instance)


class ToolGroup:
    """Tools that share state, such as a connection or a timeout.

    A subclass sets its attributes first and then calls `super().__init__(name=...)`. A method that overrides a
    tool without the decorator is no tool any more.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._tools: dict[str, Callable[..., Any]] = {}
        for attribute in dir(type(self)):
            marked = inspect.getattr_static(type(self), attribute)
            if isinstance(marked, tool):
                self._tools[marked.name] = MethodType(marked.func, self)

    def get_name(self) -> str:
        """Return the name of the group."""
        return self.name

    def get_tool_names(self) -> list[str]:
        """Return the names of the tools, sorted by attribute."""
        return list(self._tools)

    def get_tool(self, name: str) -> Callable[..., Any] | None:
        """Return the bound tool, or None when there is none of that name."""
        return self._tools.get(name)

    def execute_tool(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a tool; raises `ValueError` when there is none of that name."""
        if name not in self._tools:
            raise ValueError(f"Tool '{name}' not found in group '{self.name}'.")
        return self._tools[name](*args, **kwargs)

    def get_tool_to_group_mapping(self) -> dict[str, str]:
        """Return the name of this group by tool name."""
        return dict.fromkeys(self._tools, self.name)
