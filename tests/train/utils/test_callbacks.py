"""Callbacks run in order, steer through flags, and let exceptions out."""

import pytest

from skyrl.train.utils.callbacks import EVENTS, CallbackHandler, CallbackInput, TrainingCallback, TrainingControl


def where(**options):
    return CallbackInput(global_step=3, epoch=0, total_steps=10, steps_per_epoch=5, **options)


@pytest.mark.parametrize("event", EVENTS)
def test_every_event_reaches_its_hook_with_trainer_input_and_control(event):
    seen = []
    callback = type("Spy", (TrainingCallback,), {event: lambda self, *args: seen.append(args)})()
    handler = CallbackHandler([callback])
    trainer, callback_input, control = object(), where(), TrainingControl()
    handler.call(event, trainer, callback_input, control)
    assert seen == [(trainer, callback_input, control)]


def test_callbacks_run_in_the_order_of_registration():
    order = []

    class Named(TrainingCallback):
        def __init__(self, name):
            self.name = name

        def on_step_end(self, trainer, callback_input, control):
            order.append(self.name)

    handler = CallbackHandler([Named("a"), Named("b")])
    handler.add(Named("c"))
    handler.call("on_step_end", None, where(), TrainingControl())
    assert order == ["a", "b", "c"]


def test_the_base_class_does_nothing():
    handler = CallbackHandler([TrainingCallback()])
    control = TrainingControl()
    for event in EVENTS:
        handler.call(event, None, where(), control)
    assert control == TrainingControl()


class Wants(TrainingCallback):
    def on_step_end(self, trainer, callback_input, control):
        control.should_save = control.should_evaluate = True

    def on_log(self, trainer, callback_input, control):
        callback_input.logs["mine"] = 1.0
        control.should_evaluate = True


def test_requests_are_taken_once_and_then_cleared():
    control = TrainingControl()
    CallbackHandler([Wants()]).call("on_step_end", None, where(), control)
    assert control.take() == TrainingControl(should_save=True, should_evaluate=True)
    assert control.take() == TrainingControl()


def test_a_request_made_after_the_step_end_waits_for_the_next_step():
    handler, control = CallbackHandler([Wants()]), TrainingControl()
    handler.call("on_step_end", None, where(), control)
    control.take()
    handler.call("on_log", None, where(logs={}), control)
    assert control.take() == TrainingControl(should_evaluate=True)


def test_a_request_to_stop_is_not_forgotten():
    class Stop(TrainingCallback):
        def on_eval_end(self, trainer, callback_input, control):
            control.should_stop = callback_input.metrics["eval/all/avg_score"] > 0.9

    control = TrainingControl()
    CallbackHandler([Stop()]).call("on_eval_end", None, where(metrics={"eval/all/avg_score": 0.95}), control)
    assert control.take().should_stop and control.take().should_stop


def test_logs_changed_in_place_are_the_trainer_s_logs():
    logs = {"reward": 0.5}
    CallbackHandler([Wants()]).call("on_log", None, where(logs=logs), TrainingControl())
    assert logs == {"reward": 0.5, "mine": 1.0}


def test_an_exception_propagates_and_later_callbacks_do_not_run():
    class Raises(TrainingCallback):
        def on_save(self, trainer, callback_input, control):
            raise RuntimeError(callback_input.ckpt_path)

    class Never(TrainingCallback):
        def on_save(self, trainer, callback_input, control):
            raise AssertionError

    with pytest.raises(RuntimeError, match="global_step_3"):
        CallbackHandler([Raises(), Never()]).call(
            "on_save", None, where(ckpt_path="x/global_step_3"), TrainingControl()
        )


@pytest.mark.parametrize("wrong", [TrainingCallback, print, None])
def test_a_class_or_function_is_no_callback(wrong):
    with pytest.raises(TypeError, match="instance of TrainingCallback"):
        CallbackHandler([wrong])


def test_an_unknown_event_is_our_bug():
    with pytest.raises(ValueError, match="on_stepend"):
        CallbackHandler().call("on_stepend", None, where(), TrainingControl())
