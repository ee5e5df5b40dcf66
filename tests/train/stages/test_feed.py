"""Batches pass after pass."""

import pytest

from skyrl.errors import DatasetError
from skyrl.train.stages.feed import PromptFeed


class Loader:
    """Two batches a pass, like a stateful loader: it goes on where `load_state_dict` says."""

    def __init__(self, batches=("a", "b")):
        self.batches, self.position = batches, 0

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        start, self.position = self.position, 0
        for number in range(start, len(self.batches)):
            self.position = number + 1
            yield [{"uid": self.batches[number]}]
        self.position = 0

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


def make_feed(loader=None, passes=2):
    loader, events = loader or Loader(), []
    feed = PromptFeed(
        lambda: loader,
        passes=passes,
        on_epoch_start=lambda: events.append(("start", feed.next_epoch)),
        on_epoch_end=lambda: events.append(("end", feed.epoch)),
    )
    return feed, events


def uid(batch):
    return None if batch is None else batch[0]["uid"]


def test_passes_follow_each_other_with_their_events():
    feed, events = make_feed()
    drawn = []
    while (batch := feed.draw()) is not None:
        drawn.append((uid(batch), feed.epoch))
        events.append(uid(batch))
    feed.close()
    feed.close()
    assert drawn == [("a", 0), ("b", 0), ("a", 1), ("b", 1)]
    assert events == [("start", 0), "a", "b", ("end", 0), ("start", 1), "a", "b", ("end", 1)]
    assert feed.is_used_up


def test_a_step_ends_an_epoch_when_it_takes_the_last_batch_of_a_pass():
    feed, _ = make_feed(passes=3)
    ends = []
    for batches in (1, 1, 3):
        feed.begin_step(may_be_abandoned=False)
        for _ in range(batches):
            feed.draw()
        ends.append(feed.step_ends_epoch)
    assert ends == [False, True, True]


def test_an_abandoned_step_leaves_the_place_before_it():
    feed, _ = make_feed(passes=1)
    feed.begin_step(may_be_abandoned=True)
    assert uid(feed.draw()) == "a"
    assert feed.state() == {"position": 1}
    feed.begin_step(may_be_abandoned=True)
    assert [uid(feed.draw()), uid(feed.draw())] == ["b", None]
    assert feed.state() == {"position": 2}
    feed.abandon_step()
    assert (feed.drawn, feed.state()) == (1, {"position": 1})
    assert feed.draw() is None


def test_a_resumed_feed_goes_on_inside_its_epoch():
    feed, events = make_feed()
    feed.resume(3, {"position": 1})
    assert (uid(feed.draw()), feed.draw()) == ("b", None)
    assert (feed.drawn, feed.epoch, events) == (4, 1, [("start", 1)])


def test_a_loader_that_was_saved_at_the_end_of_a_pass_ends_it_without_an_event():
    feed, events = make_feed()
    feed.resume(2, {"position": 2})
    assert uid(feed.draw()) == "a"
    assert events == [("start", 1)]


def test_without_the_loaders_state_its_epoch_starts_again():
    feed, _ = make_feed()
    feed.resume(3, None)
    assert (feed.drawn, uid(feed.draw()), feed.drawn) == (2, "a", 3)


def test_a_loader_without_batches_is_an_error_and_no_endless_loop():
    class Empty(Loader):
        def __iter__(self):
            return iter(())

    feed, _ = make_feed(Empty())
    with pytest.raises(DatasetError, match=r"data\.train_data: the data loader gives no batch"):
        feed.draw()


def test_a_run_without_data_has_no_place():
    feed = PromptFeed(lambda: None, passes=1, on_epoch_start=list, on_epoch_end=list)
    assert (feed.state(), feed.epoch, feed.batches_per_pass, feed.draw()) == (None, 0, 0, None)
    feed.resume(3, None)
    assert feed.drawn == 3
