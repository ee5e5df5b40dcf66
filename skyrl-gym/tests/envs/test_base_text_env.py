import pytest

from skyrl_gym.envs.base_text_env import BaseTextEnv
from skyrl_gym.tools import ToolGroup, tool


class Echo(ToolGroup):
    @tool
    def echo(self, a, b):
        return [a, b]


def test_defaults():
    env = BaseTextEnv()
    assert (env.turns, env.max_turns, env.tool_groups, env.tool_to_toolgroup) == (0, 1, [], {})
    prompt = [{"role": "user", "content": "hi"}]
    assert env.init(prompt) == (prompt, {})
    assert env.get_metrics() == {}
    assert BaseTextEnv.aggregate_metrics([{"a": 1}, {"a": 2}]) == {"a": 1.5}
    env.close()
    env.close()


def test_step_must_be_defined():
    with pytest.raises(NotImplementedError):
        BaseTextEnv().step("x")


def test_tools_are_found_by_group():
    env = BaseTextEnv()
    env.init_tool_groups([Echo("one")])
    assert env.tool_to_toolgroup == {"echo": "one"}
    assert env._execute_tool("one", "echo", (1, 2)) == [1, 2]
    with pytest.raises(ValueError, match=r"ToolGroup 'two' not found\."):
        env._execute_tool("two", "echo", [])


def test_one_tool_name_in_two_groups_is_an_error():
    with pytest.raises(ValueError, match="tool 'echo' is in the groups 'one' and 'two'"):
        BaseTextEnv().init_tool_groups([Echo("one"), Echo("two")])
