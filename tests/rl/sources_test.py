"""Sources: every method keeps the contract that the loop of train.py relies on."""

import dataclasses
import json
import shutil
import types

import jax
import numpy as np
import pytest

from dllm_jax.models import hf
from dllm_jax.models.config import ModelConfig
from dllm_jax.models.vision.look import Table
from dllm_jax.models.vision.prompts import Picture, Prompt, pictures_of
from dllm_jax.rl import networks, sources
from dllm_jax.rl.config import (
    VALUES,
    BatchConfig,
    NoiseConfig,
    ObjectiveConfig,
    RLConfig,
)
from dllm_jax.rl.objectives import OBJECTIVES
from dllm_jax.rl.rewards import Grades, process
from tests.rl import lent

ELBO = ObjectiveConfig(aggregate="elbo", reference_beta=0.2)


def settings(method: str, folder) -> sources.Settings:
    """Returns settings that fit a method."""
    given = lent.settings()
    if method == "sft":
        return dataclasses.replace(
            given,
            noise=NoiseConfig(kind="semi_ar"),
            data=dataclasses.replace(given.data, response="answer"),
        )
    if method == "reward":
        path = lent.write_pairs(folder / "pairs.jsonl")
        return dataclasses.replace(
            given,
            noise=NoiseConfig(kind="end"),
            data=dataclasses.replace(given.data, train=path),
        )
    if method == "dpo":
        path = lent.write_pairs(folder / "pairs.jsonl")
        return dataclasses.replace(
            given,
            noise=NoiseConfig(kind="subset", draws=2),
            objective=ELBO,
            data=dataclasses.replace(given.data, train=path),
        )
    return given


@pytest.fixture(params=sources.SOURCES)
def source(request, tmp_path):
    """A source of each method."""
    chosen = settings(request.param, tmp_path)
    return sources.SOURCES[request.param](chosen, lent.tools(chosen, tmp_path))


def fetched(made: sources.StepBatches):
    """Returns a step's batches on the host."""
    return jax.device_get(made.batches)


def check_equal(ours, others):
    """Asserts that batches hold the same."""
    jax.tree.map(np.testing.assert_array_equal, ours, others)


def test_a_source_says_how_far_its_run_goes(source):
    rl = isinstance(source, sources.RL)
    assert source.steps == (7 if rl else 9)
    assert source.taken_per_step == (4 if rl else 6)
    assert source.updates == (2 if rl else 1)
    assert source.samples == rl
    plans = source.plans(source.settings)
    assert plans.keys() == ({"policy", "value"} if rl else {"policy"})
    assert plans["policy"].updates == source.steps * source.updates


def test_every_batch_has_the_shape_of_the_blank_one(source):
    blank = source.blank()
    assert blank.used.shape == ()
    made = source.batches(1, 0, lent.Weights(), lent.score)
    assert 0 < len(made.batches) <= source.updates
    for batch in made.batches:
        assert batch.used > 0
        jax.tree.map(
            lambda x, y: np.testing.assert_equal(x.shape, y.shape), batch, blank
        )
        jax.tree.map(
            lambda x, y: np.testing.assert_equal(x.dtype, y.dtype), batch, blank
        )
        assert jax.tree.map(lambda x: x.sharding, batch) == jax.tree.map(
            lambda x: x.sharding, blank
        )
    assert all(np.isfinite(float(x)) for x in made.metrics.values())


def test_a_step_is_a_function_of_its_number_its_place_and_the_weights(source):
    def step(*args):
        return source.batches(*args, lent.score)

    once, again = (step(2, 8, lent.Weights()) for _ in range(2))
    assert once.metrics == again.metrics
    check_equal(fetched(once), fetched(again))
    further = fetched(step(2, 8 + source.taken_per_step, lent.Weights()))
    assert (fetched(once)[0].tokens_BT != further[0].tokens_BT).any()


def test_the_data_come_round_again(source):
    assert source.batches(1, 10**6 + 1, lent.Weights(), lent.score).batches


def test_only_what_compares_models_asks_for_the_reference(tmp_path):
    chosen = settings("rl", tmp_path)
    for beta in (0.0, 0.1):
        changed = dataclasses.replace(
            chosen, objective=ObjectiveConfig(reference_beta=beta)
        )
        source = sources.RL(changed, lent.tools(changed, tmp_path))
        assert source.reference == (beta > 0)
        assert source.objective.reference_beta == beta
    pairs = settings("dpo", tmp_path)
    source = sources.DPO(pairs, lent.tools(pairs, tmp_path))
    assert source.reference
    assert source.objective.reference_beta == 0  # it is in the factors of the gradient
    assert not sources.SFT.reference


def test_rl_tells_the_rates_of_what_was_done(tmp_path):
    chosen = settings("rl", tmp_path)
    source = sources.RL(chosen, lent.tools(chosen, tmp_path))
    made = source.batches(1, 0, lent.Weights(), lent.score)
    assert made.sampled == 16 * lent.ANSWER
    seconds = {"rollout": 2.0, "reward": 4.0, "score": 8.0}
    rates = made.rates(seconds)
    assert rates["tokens_per_second/rollout"] == made.sampled / 2
    assert len(rates) == 3
    idle = made._replace(batches=[])
    assert idle.rates(seconds).keys() == rates.keys() - {"tokens_per_second/score"}
    assert made._replace(sampled=None).rates(seconds) == {}


def test_rl_leaves_as_many_samples_as_it_is_asked_for(tmp_path):
    chosen = settings("rl", tmp_path)
    source = sources.RL(chosen, lent.tools(chosen, tmp_path, samples=3))
    source.batches(5, 0, lent.Weights(), lent.score)
    lines = (tmp_path / "samples" / "step_000005.jsonl").read_text().splitlines()
    assert [json.loads(line)["group"] for line in lines] == [
        0,
        1,
        2,
    ]  # spread over the groups


def test_a_signal_ends_a_step_of_rl(tmp_path):
    chosen = settings("rl", tmp_path)
    source = sources.RL(chosen, lent.tools(chosen, tmp_path, stop=lambda: True))
    assert source.batches(1, 0, lent.Weights(), lent.score) is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            {"filter": "solvable", "min_solved": 0.9, "max_solved": 1.0},
            "no group is solvable in [0.9, 1.0]",
        ),
        ({"filter": "paced"}, "no group is paced"),
    ],
)
def test_rl_says_why_a_step_has_nothing_to_learn(tmp_path, change, reason):
    rl = RLConfig(prompts=4, group=4, **change)
    chosen, heard = dataclasses.replace(settings("rl", tmp_path), rl=rl), []
    source = sources.RL(chosen, lent.tools(chosen, tmp_path, say=heard.append))
    heard.clear()  # what is said at the start
    made = source.batches(4, 0, lent.Weights(), lent.score)
    assert made.batches == []
    assert made.metrics["groups_kept"] == 0
    assert heard == [f"step 4: {reason}, nothing to learn; the step is skipped"]


def test_a_step_whose_answers_nobody_graded_says_so(tmp_path):
    def grade(texts, problems, trace):
        return Grades(np.full(len(texts), np.nan, np.float32))

    chosen, heard = settings("rl", tmp_path), []
    tools = lent.tools(chosen, tmp_path, say=heard.append)
    tools = dataclasses.replace(
        tools, grader=dataclasses.replace(tools.grader, grade=grade)
    )
    source = sources.RL(chosen, tools)
    assert source.batches(4, 0, lent.Weights(), lent.score).batches == []
    assert "step 4: no answer could be graded, nothing to learn" in heard[-1]


def test_examples_say_how_many_are_left_out(tmp_path):
    chosen, heard = settings("sft", tmp_path), []
    sampler = dataclasses.replace(chosen.sampler, max_new=4)
    chosen = dataclasses.replace(chosen, sampler=sampler)
    source = sources.SFT(chosen, lent.tools(chosen, tmp_path, say=heard.append))
    left = len((lent.ARITHMETIC / "heldout.jsonl").read_text().splitlines())
    left -= len(source.examples)
    assert heard == [
        f"{len(source.examples)} examples, {left} empty or too long and left out"
    ]


def test_pairs_are_counted_as_pairs(tmp_path):
    chosen, heard = settings("dpo", tmp_path), []
    source = sources.DPO(chosen, lent.tools(chosen, tmp_path, say=heard.append))
    count = len(source.examples) // 2
    assert heard == [f"{count} pairs, 0 empty or too long and left out"]


def test_a_pair_is_two_rows_and_both_are_scored(tmp_path):
    chosen = settings("dpo", tmp_path)
    source = sources.DPO(chosen, lent.tools(chosen, tmp_path))
    made = source.batches(1, 0, lent.Weights(), lent.score)
    assert made.metrics["preference_loss"] == pytest.approx(np.log(2), rel=1e-5)
    assert made.metrics["preference_margin"] == 0  # the policy is the reference still
    (batch,) = fetched(made)
    assert (batch.adv_BU > 0).any() and (batch.adv_BU < 0).any()


@pytest.mark.parametrize(("rows", "padding"), [(4, False), (512, True)])
def test_rl_says_what_stays_padding(tmp_path, rows, padding):
    said = []
    settings = lent.settings(batch=BatchConfig(rows=rows, tokens=64))
    sources.RL(settings, lent.tools(settings, tmp_path, say=said.append))
    most = [line for line in said if "rows of a microbatch: the others are" in line]
    assert bool(most) == padding


@pytest.mark.parametrize("value", VALUES)
def test_rl_says_what_its_critic_costs(tmp_path, value):
    said = []
    settings = lent.settings(batch=BatchConfig(rows=4, tokens=64))
    rl = dataclasses.replace(settings.rl, value=value)
    settings = dataclasses.replace(settings, rl=rl)
    sources.RL(settings, lent.tools(settings, tmp_path, say=said.append))
    (line,) = (line for line in said if line.startswith("rl.value="))
    share = networks.value_share(
        settings.model, settings.layout.seats(settings.batch), settings.batch
    )
    words = {
        "own": f" takes {share:.0%};",
        "trace": "none of an update's FLOPs",
        "head": f": {settings.model.d_model} weights on the policy's last layer",
        "none": "at no cost",
    }
    assert line.startswith(f"rl.value={value!r}: ") and words[value] in line


def test_a_value_network_takes_half_but_for_the_language_head():
    sizes = {"vocab": 100, "d_model": 8, "heads": 2, "kv_heads": 1, "head_dim": 4}
    model = ModelConfig(layers=3, ffw=16, qk_norm=False, **sizes)
    layer = 2 * 64 + 2 * 32 + 3 * 128 + 2 * 8  # q and o; k and v; feed-forward; norms
    cfg = BatchConfig(rows=1, tokens=64)
    found = networks.value_share(model, 16, cfg)
    assert found == pytest.approx(3 * layer / (6 * layer + 800 / 4))
    # Of eight experts two are chosen: 2 x 3 x 8 x 8, and a router, for each token.
    experts = {"experts": 8, "experts_per_token": 2, "expert_ffw": 8}
    sparse = dataclasses.replace(model, **experts)
    layer += 2 * 3 * 64 + 64 - 3 * 128
    found = networks.value_share(sparse, 16, cfg)
    assert found == pytest.approx(3 * layer / (6 * layer + 800 / 4))


# ---- RL's levers: refill, truncation, mixtures, problems that rest, passes -----------


def rl_source(tmp_path, tools=None, grade=None, **changes):
    """Returns RL's source with some keys of its own."""
    chosen = settings("rl", tmp_path)
    chosen = dataclasses.replace(chosen, rl=dataclasses.replace(chosen.rl, **changes))
    lend = lent.tools(chosen, tmp_path, **(tools or {}))
    if grade is not None:
        lend.grader = dataclasses.replace(lend.grader, grade=grade)
    return sources.RL(chosen, lend)


def pass_every_third(texts, problems, trace):
    """Returns rewards by which of three groups of four one passes: its own two are right."""
    i = np.arange(len(texts))
    return Grades(((i // 4 % 3 == 0) & (i % 2 == 0)).astype(np.float32))


@pytest.mark.parametrize(
    ("most", "asked", "kept"),
    # 4 prompts: groups 0 and 3 pass. 2 are missing: as many again at that rate, 4: 2 pass.
    [(0, 4, 2), (4, 4, 2), (6, 6, 3), (100, 8, 4)],
)
def test_groups_are_refilled_until_enough_pass(tmp_path, most, asked, kept):
    how = {"min_solved": 0.2, "max_solved": 0.9, "max_prompts": most}
    source = rl_source(tmp_path, grade=pass_every_third, **how)
    made = source.batches(1, 0, lent.Weights(), lent.score)
    assert made.metrics["groups_kept"] == kept
    assert made.taken == asked and made.sampled == asked * 4 * lent.ANSWER
    assert made.metrics.get("prompts_asked", asked) == asked
    again = source.batches(1, 0, lent.Weights(), lent.score)
    check_equal(fetched(made), fetched(again))


def test_a_refill_asks_other_problems_with_other_draws(tmp_path):
    asked = []

    class Spy(lent.Answerer):
        def stream(self, params, prompts, key, **how):
            asked.append((prompts[::4], jax.random.key_data(key).tolist()))
            yield from super().stream(params, prompts, key, **how)

    sampler = lent.settings().sampler
    spy = {"answerer": Spy(sampler.slots, sampler.max_prompt)}
    how = {"min_solved": 0.2, "max_solved": 0.9, "max_prompts": 99}
    source = rl_source(tmp_path, spy, pass_every_third, **how)
    made = source.batches(1, 0, lent.Weights(), lent.score)
    (first, one), (second, other) = asked
    assert one != other and not {*map(tuple, first)} & {*map(tuple, second)}
    asked.clear()
    source.batches(2, made.taken, lent.Weights(), lent.score)
    assert asked[0][0] not in (first, second)


def test_a_refill_is_learned_from_with_its_own_images(tmp_path):
    """Each time that a step asks has a table; the batches see one of all its images."""
    vocab, tables, packed = lent.MODEL.vocab, [], []

    def look(prompts):
        found = dict.fromkeys(x.mark for p in prompts for x in pictures_of(p))
        tables.append(Table(None, {mark: 2 * i for i, mark in enumerate(found)}))
        return tables[-1]

    class Looks(lent.Answerer):
        def stream(self, params, prompts, key, **how):
            table = look(prompts)
            shown = [table.placed(prompt, vocab) for prompt in prompts]
            yield from super().stream(params, shown, key, **how)

    class Weights(lent.Weights):
        def seeing(self, seen):
            return self

    sampler = lent.settings().sampler
    lend = {"answerer": Looks(sampler.slots, sampler.max_prompt)}
    lend["eyes"] = types.SimpleNamespace(look=look)
    how = {"min_solved": 0.2, "max_solved": 0.9, "max_prompts": 99}
    source = rl_source(tmp_path, lend, pass_every_third, **how)
    for i, problem in enumerate(source.problems):
        picture = Picture("", str(i), (1, 1), rows=2)
        ids = Prompt([5 + i // 9, 5 + i % 9, vocab, vocab + 1], (picture,))
        source.problems[i] = dataclasses.replace(problem, prompt_ids=ids)
    pack = source.pack
    source.pack = lambda trace, *given, **named: (
        packed.append(trace) or pack(trace, *given, **named)
    )
    assert source.batches(1, 0, Weights(), lent.score).metrics["prompts_asked"] == 8
    assert len(tables) == 3
    seen = set()
    for tokens_T in (row for trace in packed for row in trace.tokens_BT):
        high, low, *rows = tokens_T[:4].tolist()
        first = vocab + tables[-1].first_of[str(9 * (high - 5) + low - 5)]
        assert rows == [first, first + 1]
        seen.add(first)
    assert len(seen) == 4 and max(seen) >= vocab + 2 * 4  # of both times that it asked


def test_cut_answers_may_leave_their_groups(tmp_path):
    class Cut(lent.Answerer):
        def stream(self, params, prompts, key, **how):
            for i, answer in super().stream(params, prompts, key, **how):
                yield i, answer._replace(stopped=np.bool_(i % 4 != 1))

    sampler = lent.settings().sampler
    spy = {"answerer": Cut(sampler.slots, sampler.max_prompt)}
    kept = {}
    for truncated in ("graded", "mask"):
        source = rl_source(tmp_path, spy, truncated=truncated)
        source.tools.truncated_wrong = source.settings.rl.truncated_wrong
        made = source.batches(1, 0, lent.Weights(), lent.score)
        weights = [np.asarray(batch.weight_BU) > 0 for batch in fetched(made)]
        kept[truncated] = sum(int(weight.sum()) for weight in weights)
        assert made.metrics["truncated"] == pytest.approx(0.25)
        assert made.metrics["graded_timeouts"] == 0
    assert kept == {"graded": 16 * lent.ANSWER, "mask": 12 * lent.ANSWER}


@pytest.mark.parametrize("of_no_weight", [False, True])
def test_what_is_not_judged_tells_nothing_of_a_problem(tmp_path, of_no_weight):
    """Of a group's others alone is remembered how many were right, and of none nothing."""

    def grade(texts, problems, trace):
        right_n = np.ones(len(texts), np.float32)
        right_n[::2], right_n[:4] = np.nan, np.nan
        if of_no_weight:
            return Grades(np.ones(len(texts)), parts={"math": right_n})
        return Grades(right_n)

    source = rl_source(tmp_path, grade=grade, rest_after=1)
    source.batches(1, 0, lent.Weights(), lent.score)
    told = source.curriculum.memory
    assert [row[1:] for row in told] == [[0.75, 1, source.settings.rl.rest_for]] * 3


@pytest.mark.parametrize("loss", [x for x, row in OBJECTIVES.items() if row.rl])
def test_rewards_of_tokens_are_for_losses_of_tokens(tmp_path, loss):
    def grade(texts, problems, trace):
        right_n = np.arange(len(texts)) % 2
        return Grades(right_n, np.ones(trace.tokens_BT.shape))

    chosen = settings("rl", tmp_path)
    objective = dataclasses.replace(chosen.objective, loss=loss)
    chosen = dataclasses.replace(chosen, objective=objective)
    lend = lent.tools(chosen, tmp_path)
    lend.grader = dataclasses.replace(lend.grader, grade=grade)
    source = sources.RL(chosen, lend)
    if loss in ("policy", "dipo"):
        assert source.asked(1, 0, lent.Weights())[1].reward_nT is not None
        return
    with pytest.raises(ValueError, match=f"tokens rewards .*loss='{loss}'"):
        source.batches(1, 0, lent.Weights(), lent.score)


def test_a_mixture_asks_both_files(tmp_path):
    lines = (lent.ARITHMETIC / "heldout.jsonl").read_text().splitlines()
    for name, part in (("a", lines[:5]), ("b", lines[5:8])):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(part))
    chosen = settings("rl", tmp_path)
    both = f"{tmp_path}/a.jsonl:3,{tmp_path}/b.jsonl:1"
    chosen = dataclasses.replace(
        chosen, data=dataclasses.replace(chosen.data, train=both)
    )
    source = sources.RL(chosen, lent.tools(chosen, tmp_path))
    assert (source.sizes, source.weights) == ([5, 3], [0.75, 0.25])
    chosen_n = [i for place in range(0, 80, 4) for i in source.drawn(place, 4)[0]]
    share = np.mean([i >= 5 for i in chosen_n])
    assert 0.1 < share < 0.4 and set(chosen_n) == set(range(8))
    lost = dataclasses.replace(
        chosen, data=dataclasses.replace(chosen.data, train=f"{both},{tmp_path}/c")
    )
    with pytest.raises(ValueError, match="c': no such file"):
        sources.RL(lost, lent.tools(lost, tmp_path))


def test_examples_are_mixed_too(tmp_path):
    chosen = settings("sft", tmp_path)
    path = chosen.data.train
    copy = tmp_path / "copy.jsonl"
    shutil.copy(path, copy)
    both = dataclasses.replace(chosen.data, train=f"{path}:1,{copy}:1")
    alone = sources.SFT(chosen, lent.tools(chosen, tmp_path))
    chosen = dataclasses.replace(chosen, data=both)
    source = sources.SFT(chosen, lent.tools(chosen, tmp_path))
    assert source.sizes == alone.sizes * 2
    assert len(source.examples) == 2 * len(alone.examples)
    assert source.batches(1, 0, lent.Weights(), lent.score).batches


@pytest.mark.parametrize(
    "levers",
    [
        {"rest_after": 1, "rest_for": 2, "curriculum": 0.7},
        {"value": "trace", "max_prompts": 6, "min_solved": 0.3},
    ],
)
def test_a_step_is_a_function_of_what_is_remembered_too(tmp_path, levers):
    """As a run that is killed after a step and resumed from its checkpoint's JSON."""

    def steps(source, first, taken):
        made = []
        for step in range(first, 6):
            made.append(source.batches(step, taken, lent.Weights(step), lent.score))
            taken += made[-1].taken
            memory.append(json.loads(json.dumps(source.memory)))
        return made

    memory = []
    whole = steps(rl_source(tmp_path, **levers), 1, 0)
    assert memory[1] != memory[2]
    resumed = rl_source(tmp_path, **levers)
    resumed.recall(memory[1])
    later = steps(resumed, 3, sum(made.taken for made in whole[:2]))
    for one, other in zip(whole[2:], later, strict=True):
        assert one.metrics == other.metrics
        check_equal(fetched(one), fetched(other))
    assert memory[2:5] == memory[5:]


def test_passes_over_a_steps_answers(tmp_path):
    both, value = ("policy", "value"), ("value",)
    source = rl_source(tmp_path, epochs=2, value_epochs=3, value_warmup=1)
    made = sources.StepBatches({}, ["a", "b"])
    assert source.passes(1, made) == [(value, "a"), (value, "b")] * 3
    assert source.passes(2, made) == 2 * (
        [(both, "a"), (both, "b")] + 2 * [(value, "a"), (value, "b")]
    )
    more = made._replace(dropped=("c",))
    assert source.passes(1, more) == [(value, "a"), (value, "b"), (value, "c")] * 3
    assert source.passes(2, more)[:3] == [(both, "a"), (both, "b"), (value, "c")]
    plans = source.plans(source.settings)
    assert plans["policy"].updates == 6 * 2 * 2  # steps but the first, updates, epochs
    assert plans["value"].updates == 7 * 2 * 2 * 3
    alone = rl_source(tmp_path, value="trace")
    assert alone.passes(1, made) == [(("policy",), "a"), (("policy",), "b")]


def test_a_value_network_learns_from_what_the_filter_drops(tmp_path):
    how = {"min_solved": 0.2, "max_solved": 0.9, "advantage": "none"}
    made = {
        whole: rl_source(
            tmp_path, grade=pass_every_third, value_all=whole, **how
        ).batches(1, 0, lent.Weights(), lent.score)
        for whole in (False, True)
    }
    check_equal(fetched(made[False]), fetched(made[True]))
    assert not made[False].dropped
    dropped = jax.device_get(made[True].dropped)
    taught = [
        sum(int((batch.weight_BU > 0).sum()) for batch in some)
        for some in (fetched(made[True]), dropped)
    ]
    assert taught == [8 * lent.ANSWER] * 2  # two groups passed, and two did not
    for batch in dropped:
        real = batch.weight_BU > 0
        assert not batch.ret_BU[real].any()  # they were all wrong
        np.testing.assert_allclose(batch.old_value_BU[real], -0.1)


def test_a_critic_of_another_shape_is_refused(tmp_path):
    networks.check_value(str(lent.ARITHMETIC / "model"), lent.MODEL, False)
    wide = dataclasses.replace(lent.MODEL, ffw=lent.MODEL.ffw * 2)
    message = "rl.value_path=.*: its layers.* is .*, the policy's .*; a critic is"
    with pytest.raises(ValueError, match=message):
        networks.check_value(str(lent.ARITHMETIC / "model"), wide, False)
    chosen = dataclasses.replace(settings("rl", tmp_path), model=wide)
    path = str(lent.ARITHMETIC / "model")
    chosen = dataclasses.replace(
        chosen, rl=dataclasses.replace(chosen.rl, value_path=path)
    )
    with pytest.raises(ValueError, match=message):
        sources.RL(chosen, lent.tools(chosen, tmp_path))


def test_a_critic_that_sees_the_record_is_not_taken_without_it(tmp_path):
    path, heads = lent.ARITHMETIC / "model", ("lm", "value", "record")
    cfg, params = hf.load(path, heads=heads)
    hf.save(tmp_path / "critic", cfg, params, like=path)
    networks.check_value(str(tmp_path / "critic"), lent.MODEL, True)
    with pytest.raises(ValueError, match="left out; set rl.value_record=True"):
        networks.check_value(str(tmp_path / "critic"), lent.MODEL, False)


def test_updates_stop_where_the_policy_is_far(tmp_path):
    source = rl_source(tmp_path, target_kl=0.01)
    assert source.far({"kl": np.float32(0.02)}) and not source.far({"kl": 0.005})
    assert not source.far({"value_loss": 1.0})
    assert not rl_source(tmp_path).far({"kl": 9.0})


def test_a_fixed_size_of_updates(tmp_path):
    source = rl_source(tmp_path, answers_per_update=3)
    assert source.updates == 5
    made = source.batches(1, 0, lent.Weights(), lent.score)
    assert len(made.batches) == 5  # of 16 answers; one is left over
    for batch in fetched(made):
        assert (batch.weight_BU > 0).sum() == 3 * lent.ANSWER


@pytest.mark.parametrize("size", [0, 9])
def test_what_is_left_over_is_in_no_number_of_an_update(tmp_path, size):
    """Of 16 answers 9 are dealt: the others have no value, and no part in a mean."""
    how = {"value": "own", "whiten": True, "updates": 1, "answers_per_update": size}
    source = rl_source(tmp_path, **how)
    made = source.batches(1, 0, lent.Weights(), lent.score)
    (batch,) = fetched(made)
    adv = np.asarray(batch.adv_BU)[np.asarray(batch.weight_BU) > 0]
    assert adv.size == (size or 16) * lent.ANSWER
    np.testing.assert_allclose([adv.mean(), adv.std()], [0, 1], atol=1e-5)
    assert made.metrics["explained_variance"] == pytest.approx(0, abs=1e-6)


def test_a_context_that_was_another_tells_nothing_of_the_sampler(tmp_path):
    for noise, same in (
        ({}, True),
        ({"shrink": 2}, False),
        ({"grid": "response"}, False),
        ({"kind": "bernoulli"}, False),
    ):
        chosen = settings("rl", tmp_path)
        chosen = dataclasses.replace(chosen, noise=NoiseConfig(**noise))
        assert chosen.as_sampled == same, noise


def test_cut_answers_that_count_for_nothing_are_shown_to_no_judge(tmp_path):
    chosen = settings("rl", tmp_path)
    chosen = dataclasses.replace(
        chosen, rl=dataclasses.replace(chosen.rl, truncated="mask")
    )
    asked = []

    def steps(texts, problems, trace, right_n):
        asked.append(trace.stopped_B.copy())
        return process.none_of(trace.tokens_BT.shape)

    tools = lent.tools(chosen, tmp_path)
    tools.grader = dataclasses.replace(tools.grader, steps=steps)
    answered = tools.answered

    def some_cut(*args, **how):
        found = answered(*args, **how)
        stopped_B = np.arange(len(found.late_n)) % 4 > 0
        return dataclasses.replace(
            found, trace=found.trace.replace(stopped_B=stopped_B)
        )

    tools.answered = some_cut
    source = sources.RL(chosen, tools)
    assert source.batches(1, 0, lent.Weights(), lent.score).batches
    assert asked and all(stopped_B.all() for stopped_B in asked)


def test_a_value_network_that_learns_from_all_has_room_and_a_schedule_for_it(tmp_path):
    few = rl_source(tmp_path, value="own")
    more = rl_source(tmp_path, value="own", value_all=True, max_prompts=12)
    assert more.updates > 2 * few.updates
    planned = sources.RL.plans(more.settings)["value"].updates
    assert planned == more.updates * more.settings.rl.steps


def test_the_anchor_to_the_reference_follows_a_line(tmp_path):
    chosen = settings("rl", tmp_path)
    objective = ObjectiveConfig(reference_beta=0.4, reference_beta_final=0.1)
    chosen = dataclasses.replace(chosen, objective=objective)
    source = sources.RL(chosen, lent.tools(chosen, tmp_path))
    blank = source.blank()
    betas = []
    for step in (1, 4, 7):  # of seven
        made = source.batches(step, 0, lent.Weights(), lent.score)
        betas += [float(batch.reference_beta) for batch in made.batches[:1]]
        for batch in made.batches:
            assert batch.reference_beta.shape == blank.reference_beta.shape == ()
            assert batch.reference_beta.dtype == blank.reference_beta.dtype
    np.testing.assert_allclose(betas, [0.4, 0.25, 0.1], rtol=1e-6)
