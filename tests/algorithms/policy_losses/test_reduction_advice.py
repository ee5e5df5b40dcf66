"""The warning about the loss reduction."""

from skyrl.algorithms.policy_losses.reduction_advice import advise_sequence_mean


def test_it_warns_once_and_names_both_keys(caplog):
    advise_sequence_mean.cache_clear()
    for _ in range(3):
        advise_sequence_mean("gspo", "token_mean")
    (record,) = caplog.records
    assert "policy_loss_type=gspo" in record.getMessage()
    assert "loss_reduction=sequence_mean, not token_mean" in record.getMessage()


def test_it_is_silent_for_sequence_mean(caplog):
    advise_sequence_mean.cache_clear()
    advise_sequence_mean("gspo", "sequence_mean")
    assert not caplog.records
