import inspect

import pytest

from skyrl_gym.tools import ToolGroup, tool


class Calculator(ToolGroup):
    def __init__(self, offset):
        self.offset = offset
        super().__init__(name="calculator")

    @tool
    def add(self, a: int, b: int = 1) -> int:
        """Add two numbers."""
        return a + b + self.offset

    @tool
    def negate(self, a: int) -> int:
        return -a

    def helper(self):
        return "no tool"


class Silent(Calculator):
    def negate(self, a):
        return a


def test_the_group_finds_its_tools_sorted():
    group = Calculator(offset=10)
    assert group.get_name() == "calculator"
    assert group.get_tool_names() == ["add", "negate"]
    assert group.get_tool_to_group_mapping() == {"add": "calculator", "negate": "calculator"}


def test_tools_are_bound_and_run():
    group = Calculator(offset=10)
    assert group.execute_tool("add", 1, b=2) == 13
    assert group.add(1) == 12
    assert group.get_tool("negate")(3) == -3
    assert group.get_tool("helper") is None


def test_an_unknown_tool_is_an_error():
    with pytest.raises(ValueError, match=r"Tool 'nope' not found in group 'calculator'\."):
        Calculator(0).execute_tool("nope")


def test_the_class_gives_the_descriptor_with_name_doc_and_signature():
    assert isinstance(Calculator.add, tool)
    assert (Calculator.add.name, Calculator.add.__doc__) == ("add", "Add two numbers.")
    assert list(inspect.signature(Calculator(0).add).parameters) == ["a", "b"]


def test_an_override_without_the_decorator_is_no_tool():
    assert Silent(0).get_tool_names() == ["add"]
