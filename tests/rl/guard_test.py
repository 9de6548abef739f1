"""What keeps a run from training on garbage: limits, skips, and how a run ends."""

import errno
import pathlib

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dllm_jax import exits
from dllm_jax.rl import guard, learner
from dllm_jax.rl.config import OptimConfig

PLANS = {
    "policy": learner.Plan(("policy",), OptimConfig(max_grad_skip=10.0), 9),
    "value": learner.Plan(("value",), OptimConfig(), 9),
}


class Saved:
    """Checkpoints that are a list of steps."""

    def __init__(self, *steps):
        self.folder, self.kept = pathlib.Path("run/checkpoints"), list(steps)

    def steps(self):
        """Returns them."""
        return self.kept

    def save(self, step, tree, meta):
        """Notes one."""
        self.kept.append(step)

    def wait(self):
        """Has nothing to wait for."""


@flax.struct.dataclass
class Batch:
    """A batch of two fields."""

    tokens_BT: jax.Array
    adv_BU: jax.Array | None = None


BATCH = Batch(np.arange(6).reshape(2, 3))


def made(folder, *steps, start=0, norms=None) -> guard.Guard:
    """Returns a guard that gives up after three skips."""
    return guard.Guard(PLANS, Saved(*steps), folder, 3, start, norms or {})


def update(norm=1.0, skipped=0.0, value_skipped=0.0, loss=1.0) -> dict:
    """Returns the metrics of an update."""
    value = {"value_grad_norm": 1.0, "value_updates_skipped": value_skipped}
    return {"loss": loss, "grad_norm": norm, "updates_skipped": skipped} | value


def test_a_limit_is_so_many_times_the_median_of_enough_norms(tmp_path):
    watch = made(tmp_path)
    for step in range(1, 8):
        watch.note(step, [update(norm=step)], [BATCH])
    assert watch.limits() == {"policy": 0.0, "value": 0.0}
    watch.note(8, [update(norm=8)], [BATCH])
    assert watch.limits() == {"policy": 45.0, "value": 0.0}  # the value's is off
    watch.note(9, [update(norm=1e9, skipped=1.0)], [BATCH])
    assert watch.limits()["policy"] == 45.0  # what was skipped is no usual norm
    again = made(tmp_path, norms=watch.norms)
    assert again.limits() == watch.limits()
    for step in range(10, 200):
        watch.note(step, [update(norm=2)], [BATCH])
    assert len(watch.norms["policy"]) == guard.WINDOW


def test_skips_are_counted_and_only_a_row_of_them_ends_a_run(tmp_path):
    watch = made(tmp_path, 4, 5, start=5)
    bad = update(norm=np.inf, skipped=1.0, loss=np.nan)
    counts = watch.note(6, [update(), bad], [BATCH, BATCH])
    assert counts == {"updates_skipped": 1.0, "value_updates_skipped": 0.0}
    watch.note(7, [], [])  # nothing was learned: neither one nor the other
    watch.check()
    worse = bad | {"value_updates_skipped": 1.0}
    counts = watch.note(8, [bad, worse], [BATCH, BATCH])
    assert counts == {"updates_skipped": 2.0, "value_updates_skipped": 1.0}
    with pytest.raises(exits.CannotGoOn) as stuck:
        watch.check()
    assert str(stuck.value) == (
        "3 updates in a row were skipped, step 6: loss, grad_norm not finite; the last "
        "good checkpoint is run/checkpoints/5"
    )
    (file,) = (tmp_path / "skipped").iterdir()  # of a row of skips the first
    assert file.name == "step_000006.npz"
    with np.load(file) as arrays:
        assert arrays.files == ["tokens_BT"]
        np.testing.assert_array_equal(arrays["tokens_BT"], BATCH.tokens_BT)
    watch.note(9, [update()], [BATCH])
    watch.check()


def test_updates_of_a_value_network_alone_do_not_end_a_policys_row(tmp_path):
    watch = made(tmp_path)
    bad = update(norm=np.inf, skipped=1.0)
    alone = {name: x for name, x in update().items() if name.startswith("value_")}
    for step in (1, 2):
        watch.note(step, [bad, alone], [BATCH, BATCH])
        assert watch.save(step, {"policy": {"w": jnp.ones(2)}}, {}) is None
        watch.check()
    watch.note(3, [bad, alone], [BATCH, BATCH])
    with pytest.raises(exits.CannotGoOn, match="3 updates in a row were skipped"):
        watch.check()
    assert len([*(tmp_path / "skipped").iterdir()]) == 1
    watch.note(4, [update()], [BATCH])
    assert watch.save(4, {"policy": {"w": jnp.ones(2)}}, {}) == 4


def test_a_full_disk_is_told_in_a_line(tmp_path, monkeypatch):
    def full(*args, **arrays):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(exits.CannotGoOn, match="no room"):
        made(tmp_path).note(1, [update(skipped=1.0)], [BATCH])


def test_a_checkpoint_that_no_update_has_shown_to_be_good_is_named_as_such(tmp_path):
    watch = made(tmp_path)
    watch.note(1, [update()], [BATCH])
    assert watch.save(1, {"policy": {"w": jnp.ones(2)}}, {}) == 1
    watch.note(2, [update(skipped=1.0, loss=np.inf)] * 3, [BATCH] * 3)
    with pytest.raises(
        exits.CannotGoOn,
        match="not finite; no update of its weights shows run/checkpoints/1, the earliest",
    ):
        watch.check()


@pytest.mark.parametrize(
    "between",  # nothing, or an update of a value network alone: neither shows it
    [[], [{"value_grad_norm": 1.0, "value_updates_skipped": 0.0}]],
)
def test_nor_is_the_one_that_a_run_went_on_from_until_an_update_shows_it(
    tmp_path, between
):
    watch = made(tmp_path, 4, 5, start=5)
    bad = update(skipped=1.0, loss=np.inf)
    watch.note(6, [bad], [BATCH])
    watch.note(7, between, [BATCH] * len(between))
    watch.note(8, [bad] * 2, [BATCH] * 2)
    with pytest.raises(exits.CannotGoOn, match="good checkpoint is run/checkpoints/4$"):
        watch.check()


def test_a_step_without_updates_shows_its_weights_to_be_good(tmp_path):
    watch = made(tmp_path, 4, 5, start=5)
    watch.note(6, [], [])
    watch.note(7, [update(skipped=1.0, loss=np.inf)] * 3, [BATCH] * 3)
    with pytest.raises(exits.CannotGoOn, match="good checkpoint is run/checkpoints/5$"):
        watch.check()


def test_a_checkpoint_that_is_being_written_is_waited_for(tmp_path):
    watch = made(tmp_path, 4)
    watch.checkpoints.wait = lambda: watch.checkpoints.kept.append(5)
    watch.note(6, [update()], [BATCH])
    watch.note(7, [update(skipped=1.0, loss=np.inf)] * 3, [BATCH] * 3)
    with pytest.raises(exits.CannotGoOn, match="good checkpoint is run/checkpoints/5$"):
        watch.check()


def test_a_norm_that_is_too_large_is_the_reason(tmp_path):
    watch = made(tmp_path)
    for step in (1, 2, 3):
        watch.note(step, [update(norm=1e5, skipped=1.0)], [BATCH])
    with pytest.raises(
        exits.CannotGoOn, match=r"step 1: grad_norm 1e\+05.*; there is no"
    ):
        watch.check()


def test_while_updates_are_skipped_nothing_is_saved(tmp_path):
    watch = made(tmp_path, 1, 2, start=2)
    states = {"policy": {"w": jnp.ones(2)}}
    watch.note(3, [update(skipped=1.0)], [BATCH])
    assert watch.save(3, states, {}) is None
    watch.note(4, [update()], [BATCH])
    assert watch.save(4, states, {}) == 4
    assert watch.checkpoints.kept == [1, 2, 4]


def test_a_state_that_is_not_finite_is_never_saved(tmp_path):
    watch = made(tmp_path, 1, 2, start=2)
    watch.note(3, [update()], [BATCH])
    bad = jnp.array([1.0, jnp.nan])
    with pytest.raises(
        exits.CannotGoOn, match="step 3: policy.w is not finite; the las"
    ):
        watch.save(3, {"policy": {"a": jnp.ones(2), "w": bad, "n": 1}}, {})
    assert watch.checkpoints.kept == [1, 2]


def test_answers_that_are_not_finite_are_the_users_until_a_run_has_trained(tmp_path):
    fresh, trained = made(tmp_path), made(tmp_path, 1, 2)
    trained.note(3, [update()], [BATCH])
    for watch, error in ((fresh, exits.NotFinite), (trained, exits.CannotGoOn)):
        with pytest.raises(error), watch.sampling(4):
            raise exits.NotFinite("all of them")


@pytest.mark.parametrize(
    ("updates", "error"),
    [
        (update(skipped=1.0, value_skipped=1.0), exits.NotFinite),
        (update(skipped=1.0), exits.CannotGoOn),
        # Of a value network alone.
        ({"value_grad_norm": 1.0, "value_updates_skipped": 1.0}, exits.NotFinite),
        ({"value_grad_norm": 1.0, "value_updates_skipped": 0.0}, exits.CannotGoOn),
    ],
)
def test_a_step_in_which_every_update_is_skipped_has_not_trained(
    tmp_path, updates, error
):
    watch = made(tmp_path)
    watch.note(1, [updates], [BATCH])
    with pytest.raises(error), watch.sampling(2):
        raise exits.NotFinite("all of them")
