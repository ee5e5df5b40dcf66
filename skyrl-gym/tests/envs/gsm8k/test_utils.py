import pytest

from skyrl_gym.envs.gsm8k.utils import compute_score, extract_solution


@pytest.mark.parametrize(
    ("text", "truth", "expected"),
    [
        ("so it is\n#### 42", "42", 1.0),
        ("#### 42", "43", 0.0),
        ("The answer is 42", "42", 0.0),
        ("#### 1,234", "1234", 1.0),
        ("#### -5", "-5", 1.0),
        ("#### 42.", "42", 0.0),
        ("#### $42", "42", 0.0),
        ("#### 1 no, #### 2", "2", 0.0),
    ],
)
def test_strict_scores(text, truth, expected):
    assert compute_score(text, truth) == expected


def test_a_wrong_answer_in_the_right_form_can_score():
    assert compute_score("#### 41", "42", format_score=0.1) == 0.1
    assert compute_score("41", "42", format_score=0.1) == 0.0
    assert compute_score("#### 42", "42", score=2.0) == 2.0


@pytest.mark.parametrize(
    ("text", "expected"), [("first 3, then 4.", "4."), ("7 .", "7"), ("none", None), ("5, yes, sir", "5")]
)
def test_flexible_takes_the_last_number(text, expected):
    assert extract_solution(text, "flexible") == expected


def test_another_method_is_an_error():
    with pytest.raises(AssertionError):
        extract_solution("1", "loose")
