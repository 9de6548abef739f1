"""The engine against its definition: same ids, steps and log-probs, come what may."""

import collections
import dataclasses
import functools
import re
import types
from unittest import mock

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest

from dllm_jax import pallas_kernels, sharding
from dllm_jax.models import acting, transformer
from dllm_jax.pallas_kernels import held_pages
from dllm_jax.sampling import denoise, engine, forwards, scheduler, state
from dllm_jax.sampling.config import SamplerConfig
from dllm_jax.sampling.engine import Engine
from dllm_jax.sampling.pages import Pages
from tests.properties import examples
from tests.sampling.common import ONE, as_on_tpu, ask, empty_again, padded, row_keys

KEY = jax.random.key(7)
CFG = SamplerConfig(
    block=4,
    steps_per_block=3,
    threshold=0.5,
    max_prompt=20,
    max_new=16,
    stop_ids=(1, 5, 9),
    rows=4,
    page=8,
    prefill=12,  # in chunks of three blocks
)


def prompts(count, seed=0, longest=20):
    """Returns ragged prompts; every third begins like the one before."""
    rng = np.random.default_rng(seed)
    out = []
    for i in range(count):
        new = rng.integers(10, 60, rng.integers(1, longest + 1)).tolist()
        if i % 3 == 2:
            new = out[-1] if i % 2 else out[-1][:16] + new[: max(0, longest - 16)]
        out.append(new)
    return out


def defined(tiny, cfg, asked):
    """Returns what the definition answers to (index, prompt, temperature, new)."""
    model, params = tiny
    prompt_BT, len_B = padded([prompt for _, prompt, *_ in asked], cfg.max_prompt)
    index_B = np.array([index for index, *_ in asked], np.uint32)
    trace = denoise.generate(
        params,
        prompt_BT,
        len_B,
        len_B + np.array([new for *_, new in asked], np.int32),
        np.array([t for *_, t, _ in asked], np.float32),
        row_keys(KEY, index_B),
        model=model,
        cfg=cfg,
    )
    trace = jax.tree.map(np.asarray, trace)
    return {a[0]: state.answer(trace, i) for i, a in enumerate(asked)}


def answers_as(made: Engine, params, want):
    """Asserts that a run answers what the definition does, and as it does."""
    got = {request.index: row for request, row in made.run(params, KEY)}
    assert got.keys() == want.keys()
    for index, row in want.items():
        same(got[index], row)


def same(got, want):
    """Asserts that a row of the engine is that of the definition."""
    end = want.prompt_len + want.len
    assert got.len == want.len
    assert got.steps == want.steps
    assert got.stopped == want.stopped
    for name in ("tokens_T", "step_T"):
        np.testing.assert_array_equal(
            getattr(got, name)[:end], getattr(want, name)[:end], err_msg=name
        )
    for name in ("logp_T", "conf_T"):
        np.testing.assert_allclose(
            getattr(got, name)[:end], getattr(want, name)[:end], atol=2e-5
        )


def sound(made: Engine):
    """Asserts that no page is lost, and that only the same keys share one."""
    scheduler = made.scheduler
    for pool in scheduler.pools:
        mates = [r for r in scheduler.active if scheduler.pool_of(r) is pool]
        held = [(r, i, page) for r in mates for i, page in enumerate(r.pages)]
        count = collections.Counter(page for *_, page in held)
        assert pool.holders == [count[page] for page in range(len(pool.holders))]
        spare = [*pool.free, *pool.idle]
        assert sorted([*count, *spare]) == list(range(len(pool.holders)))
        for page in (page for page in count if count[page] > 1):
            names = {tuple(r.page_names[i : i + 1]) for r, i, p in held if p == page}
            assert len(names) == 1 and names != {()}


ASKED = [
    (100 + i, prompt, [0.0, 1.0, 1.5][i % 3], [16, 9, 1][i % 3 if i % 2 else 0])
    for i, prompt in enumerate(prompts(18))
]


# "sequential" is denoise_test's, and generate_test's in the engine.
STRATEGIES = ("dynamic", "entropy_bounded", "static")
GROUP = [(i, list(range(10, 29)), 1.0, 16) for i in range(12)]  # of one prompt
ENOUGH = 20  # pages that all rows of CFG can use


@pytest.fixture(scope="module")
def wanted(tiny):
    """The definition's answers to ASKED under each strategy."""
    cfgs = {name: dataclasses.replace(CFG, strategy=name) for name in STRATEGIES}
    return {name: defined(tiny, cfg, ASKED) for name, cfg in cfgs.items()}


def first_six(rows: dict) -> dict:
    """Returns the answers to ASKED[:6], of all."""
    return {index: rows[index] for index, *_ in ASKED[:6]}


@pytest.fixture(scope="module")
def few_ride():
    """Where prompts ride, forwards hold four or nine windows."""
    counts = SamplerConfig.window_counts

    def fewer(cfg, rows, rides=False):
        return (4, 9) if rides else counts(cfg, rows)

    with mock.patch.object(SamplerConfig, "window_counts", fewer):
        yield


@examples(0.3)
@hypothesis.given(
    way=st.sampled_from([*((name, True) for name in STRATEGIES), ("dynamic", False)]),
    order=st.lists(st.sampled_from(range(18)), min_size=1, unique=True),
    arrive=st.lists(st.integers(0, 4), min_size=18, max_size=18),
    pages=st.integers(5, ENOUGH),
    cancelled=st.dictionaries(st.integers(1, 8), st.integers(0, 17), max_size=4),
)
def test_the_engine_is_the_definition(
    tiny, wanted, few_ride, way, order, arrive, pages, cancelled
):
    """In any order of arrival, short of pages or not, cancelled at any time.

    Prompts ride, as on a CPU, few in a forward, or do not, as elsewhere.
    """
    (model, params), (strategy, rides) = tiny, way
    cfg = dataclasses.replace(CFG, strategy=strategy)
    made = Engine(model=model, cfg=cfg, mesh=ONE())
    made.rides = rides
    # Fewer than there are, so that one program serves all.
    made.scheduler.pools = [Pages(pages)]
    made.scheduler.overbooked = pages < ENOUGH
    coming, waiting, answered = [ASKED[i] for i in order], set(), 0

    def come(count):
        new = [coming.pop() for _ in range(min(count, len(coming)))]
        ask(made, new)
        waiting.update(index for index, *_ in new)

    while coming:  # a run ends when nothing is left; what comes later starts another
        come(1)
        for request, row in made.run(params, KEY):
            waiting.remove(request.index)  # once, and not what was cancelled
            same(row, wanted[strategy][request.index])
            sound(made)
            answered += 1
            if answered in cancelled:
                made.cancel(ASKED[cancelled[answered]][0])
                waiting.discard(ASKED[cancelled[answered]][0])
            come(arrive[answered - 1])
        assert not waiting
    sound(made)
    empty_again(made)


def test_the_loop_is_the_one_of_the_platform(tiny, monkeypatch):
    made = Engine(model=tiny[0], cfg=CFG, mesh=ONE())
    assert made.loop is forwards.advance
    monkeypatch.setattr(Engine, "platform", "gpu")
    assert made.loop is forwards.advance_on_gpu


def test_rows_that_are_released_are_made_anew(tiny, wanted):
    """Their pages know nothing of the prompts that were in those before."""
    model, params = tiny
    cfg = dataclasses.replace(CFG, strategy="dynamic")
    made = Engine(model=model, cfg=cfg, mesh=ONE())
    for _ in range(2):
        ask(made, ASKED[:6])
        answers_as(made, params, first_six(wanted["dynamic"]))
        made.release()
        assert made.rows is None


def test_a_row_that_gets_further_pages_has_room_for_more(tiny, wanted, monkeypatch):
    model, params = tiny
    cfg = dataclasses.replace(CFG, strategy="dynamic")
    for module in (engine, scheduler):
        monkeypatch.setattr(module, "AHEAD", 1)
    made = Engine(model=model, cfg=cfg, mesh=ONE())
    made.scheduler.overbooked = True
    ask(made, ASKED[:6])
    answers_as(made, params, first_six(wanted["dynamic"]))
    empty_again(made)


@pytest.mark.soak
def test_the_engine_is_the_definition_where_only_some_layers_have_experts(
    tiny, one_width
):
    """Without `make soak`: such layers' cache is moe_test's."""
    sparse = {"experts": 4, "experts_per_token": 2, "expert_ffw": 12}
    model = dataclasses.replace(tiny[0], layers=3, sparse_step=2, **sparse)
    params = jax.tree.map(
        lambda x: x if (x == 1).all() else 8 * x,  # norms stay
        jax.device_get(jax.jit(transformer.init, static_argnums=1)(KEY, model)),
    )
    want = defined((model, params), CFG, ASKED[:6])
    made = Engine(model=model, cfg=CFG, mesh=ONE())
    ask(made, ASKED[:6])
    answers_as(made, params, want)


@pytest.mark.parametrize(
    ("strategy", "field", "values"),
    [
        ("dynamic", "threshold", (0.5, 0.05)),
        ("entropy_bounded", "entropy_bound", (0.35, 9)),
    ],
)
def test_other_thresholds_are_other_answers_of_the_same_program(
    tiny, wanted, strategy, field, values
):
    model, params = tiny
    cfg = dataclasses.replace(CFG, strategy=strategy)
    steps, compiled = [], []
    for value in values:
        own = dataclasses.replace(cfg, **{field: value})
        made = Engine(model=model, cfg=own, mesh=ONE())
        ask(made, ASKED)
        got = {request.index: row for request, row in made.run(params, KEY)}
        if own == cfg:
            for index, row in wanted[strategy].items():
                same(got[index], row)
        steps.append(sum(int(row.steps) for row in got.values()))
        compiled.append(made.loop._cache_size())
    assert steps[1] < steps[0]
    assert len(set(compiled)) == 1


@pytest.mark.parametrize(
    ("shift", "rows"), [pytest.param(0, 4, marks=pytest.mark.soak), (1, 4), (1, 1)]
)
def test_long_prompts_in_chunks(tiny, one_width, shift, rows):
    """Of 32 positions, one or five; of one row five are one, which may end past its table."""
    model, params = dataclasses.replace(tiny[0], shift=shift), tiny[1]
    cfg = dataclasses.replace(CFG, max_prompt=150, prefill=140, rows=rows)
    rng = np.random.default_rng(0)
    lengths = (150, 3, 130, 64, 69, 71, 128, 9, 150, 67)
    drawn = [rng.integers(10, 60, length).tolist() for length in lengths]
    drawn[-2] = drawn[0][:100] + drawn[-2][100:]  # twelve pages are known
    asked = [(i, prompt, 1.0, 6) for i, prompt in enumerate(drawn)]
    made = Engine(model=model, cfg=cfg, mesh=ONE())
    ask(made, asked)
    answers_as(made, params, defined((model, params), cfg, asked))
    empty_again(made)


def test_too_few_pages_for_one_row_are_refused(tiny):
    cfg = dataclasses.replace(CFG, pages=4)
    with pytest.raises(ValueError, match=r"sampler.pages=4 .*set it to 5 or more"):
        Engine(model=tiny[0], cfg=cfg, mesh=ONE())


@pytest.mark.parametrize(("prompt", "new"), [([], 1), ([10] * 21, 1), ([10] * 20, 17)])
def test_what_does_not_fit_is_refused(tiny, prompt, new):
    made = Engine(model=tiny[0], cfg=CFG, mesh=ONE())
    with pytest.raises(ValueError, match="does not fit sampler.max_prompt=20"):
        made.submit(prompt, index=0, temperature=1.0, new=new)


def test_requests_that_make_no_sense_are_refused(tiny):
    made = Engine(model=tiny[0], cfg=CFG, mesh=ONE())
    good = {"prompt": [10, 66], "index": 3, "temperature": 0.0, "new": 1}
    made.submit(**good)
    for bad, words in (
        ({"new": 0}, "new=0: at least 1"),
        ({"temperature": -1.0}, "temperature=-1.0: a number, 0 or >= 1e-6"),
        ({"temperature": float("nan")}, "temperature=nan"),
        # Answers would be no numbers, and have masks in them.
        ({"temperature": 1e-12}, "temperature=1e-12"),
        ({"temperature": float("inf")}, "temperature=inf"),
        ({"prompt": [10, 67]}, r"\[10, 67\].*in 0..66"),
        ({"prompt": [-1]}, r"\[-1\].*in 0..66"),
        ({}, "index=3: one that no other"),
        ({"index": 2**31}, "index=2147483648: a whole number of 32 bits"),
        ({"index": "4"}, "index='4': a whole number"),
    ):
        with pytest.raises(ValueError, match="a request needs .*" + words):
            made.submit(**{**good, "index": 3 + bool(bad), **bad})
    assert len(made.scheduler.queue) == 1
    made.cancel(3)
    made.submit(**good)  # its index is free again


@pytest.mark.soak
def test_on_a_mesh(tiny, one_width):
    """Of every axis; (1, 8, 1) is placement_test's."""
    model, params = tiny
    shape = (2, 2, 2)
    size = np.prod(shape)
    mesh = sharding.make_mesh(
        **dict(zip(("data", "fsdp", "model"), shape)), devices=jax.devices()[:size]
    )
    shapes = transformer.abstract(model, mesh, np.float32)  # placed as hf.load does
    params = jax.tree.map(lambda x, to: jax.device_put(x, to.sharding), params, shapes)
    wq = params["layers"]["wq"]
    assert wq.addressable_shards[0].data.size * shape[1] * shape[2] == wq.size
    cfg = dataclasses.replace(CFG, rows=16, prefill=40)  # a chunk, or two
    want = defined(tiny, cfg, ASKED)
    with jax.set_mesh(mesh):
        made = Engine(model=model, cfg=cfg, mesh=mesh)
        for _ in range(2):  # the second run finds everything compiled
            before = made.loop._cache_size(), engine.admit._cache_size()
            ask(made, ASKED)
            answers_as(made, params, want)
        assert before == (made.loop._cache_size(), engine.admit._cache_size())
        pages = made.rows.s.cache.k_LPOKH
        assert pages.addressable_shards[0].data.size * size == pages.size
    empty_again(made)


def test_tables_of_prompts_end_where_prompts_do(tiny, monkeypatch):
    """Their keys are never gathered over pages that only an answer can fill."""
    model, params = tiny
    asked = set()
    monkeypatch.setattr(held_pages, "widths", lambda A, least: asked.add(A) or [A])
    cfg = dataclasses.replace(CFG, max_new=52)  # no other test's: it is traced here
    Engine(model=model, cfg=cfg, mesh=ONE()).lower(params)
    assert asked == {20 // 8 + 1, (20 + 52) // 8}  # of prompts, of blocks


def test_a_block_costs_its_steps_and_a_group_one_prompt(tiny, monkeypatch):
    model, params = tiny  # of 4 whole blocks in two pages, 3 tokens of a fifth
    copies = mock.Mock(side_effect=engine.copy_pages)
    monkeypatch.setattr(engine, "copy_pages", copies)
    made = Engine(model=model, cfg=CFG, mesh=ONE())
    ask(made, GROUP)
    rows = [row for _, row in made.run(params, KEY)]
    # Every answer's blocks but its last are committed, and the prompt's whole once.
    blocks = sum(-(-int(row.prompt_len + row.len) // 4) - 4 - 1 for row in rows)
    assert blocks > 1
    assert int(made.rows.clean) == 4 + blocks
    for row in rows:
        assert row.forwards == row.steps
    # One forward for three blocks of its prompt, and no other but those of its steps: the
    # fourth block, as what it commits, rides in the first of them.
    alone = Engine(model=model, cfg=CFG, mesh=ONE())
    ask(alone, GROUP[:1])
    ((_, row),) = alone.run(params, KEY)
    assert int(alone.rows.forwards) == 1 + row.steps
    # Whole pages are shared; on one that is half full who comes later goes on in a copy.
    assert not copies.called
    ask(made, [(index, prompt[:14], *rest) for index, prompt, *rest in GROUP])
    assert len(list(made.run(params, KEY))) == len(GROUP)
    assert copies.called


def test_a_forward_copies_no_pages(tiny):
    """On CPU, where layers are arrays of their own and widths of pages are chosen from."""
    model, params = tiny
    cfg = dataclasses.replace(CFG, rows=8)
    layers = acting.laid_out(params, acting.abstract(model, ONE()))
    lowered, rows = Engine(model=model, cfg=cfg, mesh=ONE()).lower(layers)
    pool = ",".join(map(str, rows.s.cache.k_LPOKH.shape))
    text = lowered.compile().as_text()
    assert f"f32[{pool}]" in text
    assert not re.findall(rf"f32\[{pool}\]\S* copy\(", text)


def test_over_the_kernels_of_pages_and_chunks(tiny, monkeypatch):
    """Of one layer: which of many a kernel reads and writes is paged_test's."""
    model, params = dataclasses.replace(tiny[0], layers=1), tiny[1]
    params = params | {"layers": jax.tree.map(lambda x: x[:1], params["layers"])}
    cfg, asked = dataclasses.replace(CFG, rows=3, pages=7), ASKED[:4]
    want = defined((model, params), cfg, asked)
    monkeypatch.setattr(pallas_kernels.choice, "HEAD_SIZES", (model.head_dim,))
    for name in ("chunk_attention", "paired_attention", "cache_update"):
        op = functools.partial(getattr(pallas_kernels, name), interpret=True)
        monkeypatch.setattr(pallas_kernels, name, as_on_tpu(op))
    made = Engine(model=model, cfg=cfg, mesh=ONE())
    ask(made, asked)
    answers_as(made, params, want)


@pytest.mark.parametrize(("count", "sizes"), [(0, []), (2, [8]), (12, [8, 8])])
def test_a_harvest_fetches_only_rows_that_ended(tiny, monkeypatch, count, sizes):
    """No forward is run: what the device would say is put in its place."""
    made = Engine(model=tiny[0], cfg=dataclasses.replace(CFG, rows=32), mesh=ONE())
    ask(made, [(i, [10 + i] * 3, 1.0, 16) for i in range(32)])
    changes, zero_B = made.scheduler.admit(), np.zeros(32, np.int32)
    ended = [request for request in made.scheduler.active if request.row % 2][:count]
    live_B = ~np.isin(np.arange(32), [request.row for request in ended])
    told = live_B, zero_B, zero_B, zero_B + 1
    monkeypatch.setattr(made, "fetch_progress", lambda: told)
    key_B = row_keys(KEY, changes.index_B.astype(np.uint32))
    s = state.begin(
        changes.prompt_BT,
        changes.prompt_len_B,
        changes.limit_B,
        changes.temperature_B,
        key_B,
        None,
        made.cfg.slots,
        threshold_B=changes.threshold_B,
        entropy_bound_B=changes.entropy_bound_B,
    )
    made.rows, fetched, fetch = types.SimpleNamespace(s=s), [], sharding.fetch
    monkeypatch.setattr(sharding, "fetch", lambda x: fetched.append(x) or fetch(x))
    got = {request.index: answer for request, answer in made.harvest(None)}
    assert got.keys() == {request.index for request in ended} and len(got) == count
    for index, answer in got.items():
        assert answer.tokens_T[:3].tolist() == [10 + index] * 3
    assert [len(trace.tokens_BT) for trace in fetched] == sizes


def test_a_run_that_is_left_answers_nothing_later(tiny):
    model, params = tiny
    made = Engine(model=model, cfg=CFG, mesh=ONE())
    ask(made, ASKED[:6])
    for _ in made.run(params, KEY):
        break
    empty_again(made)
    ask(made, ASKED[4:6])  # one of them a second time
    answers_as(made, params, defined(tiny, CFG, ASKED[4:6]))


@pytest.mark.parametrize("leaves", [True, False])
def test_no_page_keeps_what_an_answer_nobody_took_left_there(tiny, leaves):
    """Of prompts with a NaN, whose answers end with that of another one."""
    model, params = tiny
    bad = params | {"embed": params["embed"].at[41].set(np.nan)}
    made = Engine(model=model, cfg=CFG, mesh=ONE())
    ask(made, [(0, [10] * 19, 1.0, 1), *((i, [41] * 19, 1.0, 16) for i in (1, 2, 3))])
    for request, row in made.run(bad, KEY):
        assert request.index == 0 and not row.bad
        if leaves:
            break
        for index in (1, 2, 3):
            made.cancel(index)
    asked = [(i, [10 + i] * 19, 1.0, 16) for i in range(8)]
    ask(made, asked)
    answers_as(made, bad, defined((model, bad), CFG, asked))


def test_a_prompt_with_a_nan_spoils_no_answer_but_its_own(tiny):
    """It has the first page, which is read behind the pages of others, too, and hidden."""
    model, params = tiny
    bad = params | {"embed": params["embed"].at[41].set(np.nan)}
    asked = [(0, [41] * 19, 1.0, 16), *((i, [10 + i] * 3, 1.0, 5) for i in (1, 2, 3))]
    made = Engine(model=model, cfg=CFG, mesh=ONE())
    ask(made, asked)
    answers_as(made, bad, defined((model, bad), CFG, asked))


@pytest.mark.parametrize("leave", ["cancelled", "sent back", "other weights"])
def test_no_page_keeps_what_a_row_left_there_before_it_drew(tiny, monkeypatch, leave):
    """Of a prompt with a NaN, most of which is in pages after one forward."""
    model, params = tiny
    bad = params | {"embed": params["embed"].at[41].set(np.nan)}
    made = Engine(model=model, cfg=CFG, mesh=ONE())
    ask(made, [(0, [41] * 19, 1.0, 16)])
    assert made.turn(bad, KEY, watch=lambda *_: None) == []
    (request,) = made.scheduler.active
    assert request.filled and not request.forwards
    asked = [(i, [10 + i] * 19, 1.0, 16) for i in (1, 2, 3, 4)]  # of all pages
    if leave == "cancelled":
        made.cancel(0)
    elif leave == "other weights":
        bad, asked = params, [*asked, (0, [41] * 19, 1.0, 16)]
    else:  # as for want of pages, within an admission

        def extend_pages():
            monkeypatch.undo()
            made.cancel(0)
            return False, False

        monkeypatch.setattr(made.scheduler, "extend_pages", extend_pages)
    want = defined((model, bad), CFG, asked)
    ask(made, asked[:4])
    got = []
    while made.busy:
        got += made.turn(bad, KEY)
    assert sorted(request.index for request, _ in got) == sorted(want)
    for request, row in got:
        same(row, want[request.index])
    empty_again(made)


@pytest.mark.parametrize("name", ["k_LPOKH", "v_LPOKH"])
def test_keys_or_values_alone_may_be_not_finite(tiny, name):
    model = dataclasses.replace(tiny[0], head_dim=4)  # not as many as there are heads
    made = Engine(model=model, cfg=CFG, mesh=ONE())
    made.begin(KEY)
    with jax.set_mesh(made.mesh):
        made.scheduler.left.add(1)
        assert not made.left_not_finite()
        pool = made.rows.s.cache
        pool = pool.replace(**{name: getattr(pool, name).at[0].set(np.inf)})
        made.rows = made.rows.replace(s=made.rows.s.replace(cache=pool))
        assert made.left_not_finite()


def test_who_watches_may_cancel(tiny):
    model, params = tiny
    made = Engine(model=model, cfg=CFG, mesh=ONE())
    ask(made, ASKED[:3])
    seen, (first, *rest) = [], [index for index, *_ in ASKED[:3]]

    def watch(request, row):
        seen.append(request.index)
        made.cancel(first)

    answered = [request.index for request, _ in made.run(params, KEY, watch)]
    assert seen[:3] == [first, *rest]
    assert sorted(answered) == rest and first not in seen[1:]


def test_other_weights_share_no_key(tiny):
    model, params = tiny
    made = Engine(model=model, cfg=CFG, mesh=ONE())
    other = jax.tree.map(lambda x: 1.5 * x, params)
    for weights in (params, other):
        want = defined((model, weights), CFG, GROUP)
        ask(made, GROUP)
        for request, row in made.run(weights, KEY):
            same(row, want[request.index])
    before = defined(tiny, CFG, GROUP)
    assert any((before[i].tokens_T != want[i].tokens_T).any() for i in want)


# --- Turns, as a server takes them ----------------------------------------------------


def take_turns(made: Engine, params):
    """Returns what is answered in turns until nothing is left."""
    answered = []
    while made.busy:
        answered += made.turn(params, KEY)
    return answered


def test_an_answer_shorter_than_its_block_may_take_all_steps_of_it(tiny, one_width):
    """Which is what batches are made for, where a step of the trace is a round."""
    model, params = tiny
    static = {"strategy": "static", "target": "random", "threshold": 0.9}
    cfg = dataclasses.replace(
        CFG, **static, block=8, steps_per_block=0, max_prompt=8, max_new=3, stop_ids=()
    )
    made = Engine(model=dataclasses.replace(model, block=8), cfg=cfg, mesh=ONE())
    ask(made, [(i, [10 + i] * 8, 1.0, 3) for i in range(8)])
    steps = [row.step_T[8:11] for _, row in made.run(params, KEY)]
    assert cfg.max_new < np.max(steps) <= cfg.most_steps == cfg.block


def test_turns_by_hand_are_a_run(tiny):
    model, params = tiny
    by_run, by_turn = (Engine(model=model, cfg=CFG, mesh=ONE()) for _ in range(2))
    ask(by_run, ASKED[:12])
    ask(by_turn, ASKED[:12])
    want = list(by_run.run(params, KEY))
    first, second = by_turn.turn(params, KEY), by_turn.turn(params, KEY)
    assert by_turn.busy
    got = [*first, *second, *take_turns(by_turn, params)]
    assert [r.index for r, _ in got] == [r.index for r, _ in want]
    for (_, a), (_, b) in zip(got, want, strict=True):
        jax.tree.map(np.testing.assert_array_equal, a, b)
    assert int(by_turn.rows.forwards) == int(by_run.rows.forwards)
    assert int(by_turn.rows.clean) == int(by_run.rows.clean)
    assert by_turn.turn(params, KEY) == []  # nothing waits: nothing is run
    empty_again(by_turn)


def test_turns_prefill_a_prompt_once_for_the_same_weights(tiny):
    model, params = tiny
    other = jax.tree.map(lambda x: 1.5 * x, params)
    made = Engine(model=model, cfg=CFG, mesh=ONE())

    def prefilled(weights, request, answered) -> int:
        """Returns how many blocks were run for the prompt of GROUP."""
        before = 0 if made.rows is None else int(made.rows.clean)
        ask(made, [request])
        ((_, row),) = answered(made, weights)
        same(row, defined((model, weights), CFG, [request])[request[0]])
        committed = -(-int(row.prompt_len + row.len) // CFG.block) - 4 - 1
        return int(made.rows.clean) - before - committed

    def run(made, weights):
        return made.run(weights, KEY)

    assert prefilled(params, GROUP[0], take_turns) == 4
    assert prefilled(params, GROUP[1], take_turns) == 0
    assert prefilled(other, GROUP[2], take_turns) == 4
    assert prefilled(params, GROUP[3], take_turns) == 4
    assert prefilled(params, GROUP[4], run) == 0  # what turns left is of these weights
    assert prefilled(params, GROUP[5], run) == 4  # a run leaves nothing
    assert prefilled(params, GROUP[6], take_turns) == 4


def test_an_answer_is_of_one_set_of_weights(tiny):
    model, params = tiny
    other = jax.tree.map(lambda x: 1.5 * x, params)
    made = Engine(model=model, cfg=CFG, mesh=ONE())
    ask(made, ASKED[:12])
    before = []
    for _ in range(2):  # forwards: a watched turn is one
        before += made.turn(params, KEY, watch=lambda request, row: None)
    assert any(request.filled for request in made.scheduler.active)
    after = take_turns(made, other)
    indices = [request.index for request, _ in [*before, *after]]
    assert sorted(indices) == [index for index, *_ in ASKED[:12]]
    for weights, answered in ((params, before), (other, after)):
        want = defined((model, weights), CFG, ASKED[:12])
        for request, row in answered:
            same(row, want[request.index])
    empty_again(made)


def test_cancelled_between_turns(tiny):
    model, params = tiny
    made = Engine(model=model, cfg=CFG, mesh=ONE())
    ask(made, ASKED[:6])
    made.turn(params, KEY, watch=lambda request, row: None)
    active = made.scheduler.active[0].index
    waiting = made.scheduler.queue[-1].index
    for index in (active, waiting, 12345):  # of the last there is none
        made.cancel(index)
        sound(made)
    asked = [request[0] for request in ASKED[:6]]
    left = [index for index in asked if index not in (active, waiting)]
    assert sorted(r.index for r, _ in take_turns(made, params)) == left
    empty_again(made)
