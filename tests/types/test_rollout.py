import pytest

from skyrl.types.rollout import TrajectoryID, classify_stop_reason


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("stop", "eos", "complete", "tool_calls", None), "finished"),
        (("length", "max_tokens", "context_length", "never heard of"), "truncated"),
        (("error", "abort", "timeout", "agent_timeout"), "failed"),
    ],
)
def test_stop_reasons_fall_into_three_classes(words, expected):
    assert {classify_stop_reason(word) for word in words} == {expected}


def test_ids_are_hashable_and_have_a_text_form():
    assert TrajectoryID("a", 3).to_string() == "a_3"
    assert len({TrajectoryID("a", 3), TrajectoryID("a", 3), TrajectoryID("a", 4)}) == 2
