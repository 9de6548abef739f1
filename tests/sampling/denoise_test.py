"""The sampler core against the reference, its definition, its rows and its meshes."""

import collections
import dataclasses
import functools
import types

import chex
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dllm_jax import sharding
from dllm_jax.models import hf, mask, transformer
from dllm_jax.models.mask import FAR
from dllm_jax.sampling import answers, denoise, engine, logits, state
from dllm_jax.sampling.config import SamplerConfig
from dllm_jax.sampling.state import GIVEN
from dllm_jax.sampling.strategy import STRATEGIES, Strategy
from tests.goldens import reader
from tests.sampling.common import end_of, padded, row_keys

B = 8


# --- The reference's trajectories -----------------------------------------------------


@dataclasses.dataclass
class Case:
    """One row of the reference, in our words."""

    name: str
    cfg: SamplerConfig
    token: str  # "argmax", "top_k=1 (deterministic)" or "recorded draws"
    draws: list[list[int]] | None
    prompt: list[int]
    limit: int
    answer: list[int]
    steps: list[int]
    forwards: tuple[int, int] | None  # (denoising steps, all) of a row without stop
    bug: str | None  # why the reference's answer is not ours


def read(path: str) -> list[Case]:
    """Returns the rows of a golden file."""
    table, cases = reader.read(path), []
    for recorded in table["cases"]:
        if "params" in recorded:
            cases += of_jetengine(recorded, table["mask_token_id"])
        else:
            cases.append(of_generate(recorded))
    room = {  # of all cases, so that they share a program
        "max_prompt": max(len(case.prompt) for case in cases),
        "max_new": max(case.limit - len(case.prompt) for case in cases),
    }
    return [
        dataclasses.replace(case, cfg=dataclasses.replace(case.cfg, **room))
        for case in cases
    ]


def of_jetengine(recorded: dict, mask_id: int) -> list[Case]:
    """Returns the rows of a case of the reference's inference engine."""
    params = recorded["params"]
    stops = () if params.get("ignore_eos") else (recorded["eos_token_id"],)
    cfg = config_of(
        params,
        threshold=params["dynamic_threshold"],
        top_k=params.get("topk", 0),
        top_p=params.get("topp", 1.0),
        stop_ids=stops + tuple(params.get("stop_words", ())),
    )
    rows = zip(
        recorded["prompts"],
        recorded["completions"],
        recorded["first_unmask_steps"],
        strict=True,
    )
    return [
        Case(
            name=f"{recorded['name']}[{i}]",
            cfg=cfg,
            token=recorded["token_choice"],
            draws=recorded.get("draws"),
            prompt=prompt,
            limit=len(prompt) + params["max_tokens"],
            answer=answer,
            steps=steps,
            forwards=None,
            bug=bug_of(recorded, cfg, prompt, answer, mask_id),
        )
        for i, (prompt, answer, steps) in enumerate(rows)
    ]


def of_generate(recorded: dict) -> Case:
    """Returns the row of a case of the reference's generate function.

    It answers in whole blocks, which nothing ends: ours ends at a stop id.
    """
    args, prompt, answer = recorded["args"], recorded["prompt"], recorded["output"]
    cfg = config_of(
        args,
        threshold=args["confidence_threshold"],
        top_k=args.get("top_k", 0),
        top_p=args.get("top_p", 1.0),
        stop_ids=tuple(args.get("stopping_criteria_idx", ())),
    )
    limit, forwards = len(answer), None
    ends = [at + 1 for at in range(len(prompt), limit) if answer[at] in cfg.stop_ids]
    span = slice(len(prompt), min(ends, default=None))
    if not cfg.stop_ids:  # it keeps the last block's keys too, ours need not
        count = recorded["denoise_forwards"]
        forwards = count, count + recorded["store_forwards"] - 1
    return Case(
        name=recorded["name"],
        cfg=cfg,
        token=recorded["token_choice"],
        draws=recorded.get("draws"),
        prompt=prompt,
        limit=limit,
        answer=answer[span],
        steps=recorded["unmask_step"][span],
        forwards=forwards,
        bug=bug_of(recorded, cfg, prompt, answer[span], args["mask_id"]),
    )


def config_of(params: dict, **fields) -> SamplerConfig:
    """Returns the config of a case, by the names that both programs share."""
    return SamplerConfig(
        block=params["block_length"],
        steps_per_block=params["denoising_steps"],
        strategy=params["remasking_strategy"].removeprefix("low_confidence_"),
        entropy_bound=params.get("eb_threshold", 0.35),
        temperature=params["temperature"],
        **fields,
    )


def bug_of(recorded: dict, cfg, prompt, answer, mask_id: int) -> str | None:
    """Returns why the reference's answer is not ours, if it is not."""
    if mask_id in sum(recorded.get("draws", []), answer):
        return "answers with the mask id"
    if set(prompt[len(prompt) // cfg.block * cfg.block :]) & set(cfg.stop_ids):
        return "a stop id that ends the prompt ends the answer"
    if recorded.get("overwrites_non_mask"):
        return "overwrites tokens that are not masked"
    return None


@flax.struct.dataclass
class Facts:
    """A SamplerConfig as data: one program serves every case of a block size."""

    which: jax.Array  # of STRATEGIES
    schedule: jax.Array
    threshold: jax.Array
    entropy_bound: jax.Array
    stop_ids: jax.Array
    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    replay: jax.Array  # draw by `replayed`, else by logits.draw
    token_W: jax.Array  # the tokens drawn, or -1: the arg-max


def facts(case: Case) -> Facts:
    """Returns what the case's config says; a filter that is off cuts nothing."""
    cfg = case.cfg
    idle = [cfg.schedule[-1]] * (cfg.block - cfg.steps_per_block)
    return Facts(
        which=np.int32(list(STRATEGIES).index(cfg.strategy)),
        schedule=np.array([*cfg.schedule, *idle], np.int32),
        threshold=np.float32(cfg.threshold),
        entropy_bound=np.float32(cfg.entropy_bound),
        stop_ids=np.array([*cfg.stop_ids, -1, -1][:2], np.int32),
        temperature=np.float32(cfg.temperature),
        top_k=np.int32(cfg.top_k or FAR),
        top_p=np.float32(cfg.top_p),
        replay=np.bool_(
            case.token != "argmax"
            or (cfg.temperature, cfg.top_k, cfg.top_p) != (1, 0, 1)
        ),
        token_W=np.full(cfg.block, -1, np.int32),
    )


def replayed(logits_BWV, f: Facts) -> logits.Draw:
    """Returns the reference's draw: its tokens, their filtered probabilities."""
    order_BWV = jnp.argsort(-logits_BWV, axis=-1, stable=True)
    p_BWV = jnp.take_along_axis(logits_BWV, order_BWV, axis=-1) / f.temperature
    rank_V = jnp.arange(p_BWV.shape[-1])
    p_BWV = jax.nn.softmax(jnp.where(rank_V < f.top_k, p_BWV, -jnp.inf), axis=-1)
    before_BWV = jnp.cumsum(p_BWV, axis=-1) - p_BWV
    p_BWV = jnp.where(before_BWV < f.top_p, p_BWV, 0)
    p_BWV /= p_BWV.sum(axis=-1, keepdims=True)
    token_BW = jnp.where(f.token_W[None] < 0, order_BWV[..., 0], f.token_W[None])
    mine_BWV = order_BWV == token_BW[..., None]
    conf_BW = jnp.sum(jnp.where(mine_BWV, p_BWV, 0), axis=-1)
    entropy_BW = -jnp.sum(jax.scipy.special.xlogy(p_BWV, p_BWV), axis=-1)
    return logits.Draw(
        token_BW, jnp.zeros_like(conf_BW), conf_BW, entropy_BW, conf_BW, conf_BW
    )


def any_strategy(drawn, masked_BW, quota_B, cfg):
    """Takes what the strategy number `cfg.which` takes."""
    return jax.lax.switch(
        cfg.which,
        [functools.partial(take, drawn, masked_BW, quota_B, cfg) for take in RULES],
    )


RULES = [strategy.take for strategy in STRATEGIES.values()]


@functools.partial(jax.jit, static_argnames=("model", "block"))
def step(params, s, f: Facts, *, model, block):
    """Returns the state after one `denoise.step` under these facts."""
    cfg = types.SimpleNamespace(
        block=block,
        steps_per_block=block,
        schedule=f.schedule,
        strategy="any",
        cache="auto",
        rank_temperature=0,
        guidance=0,
        tail=(),
        before_stop=False,
        pad_penalty=1,
        horizon=0,
        slots=s.tokens_BT.shape[1],
        which=f.which,
        threshold=f.threshold,
        entropy_bound=f.entropy_bound,
        stop_ids=tuple(f.stop_ids),
    )

    def draw(params, x_BWD, key_B, temperature_B, *, wanted_BW, model, cfg):
        logits_BWV = transformer.logits(params, x_BWD, model)
        ours = logits.draw(key_B, logits_BWV, temperature_B, SamplerConfig())
        theirs = replayed(logits_BWV, f)
        return jax.tree.map(lambda a, b: jnp.where(f.replay, a, b), theirs, ours)

    return denoise.step(params, s, model=model, cfg=cfg, draw=draw)


start = jax.jit(denoise.start.__wrapped__, static_argnames=("model", "cfg"))


def run(params, cases: list[Case], *, model):
    """Returns the ended state of cases that differ in nothing but their rows."""
    cfg = cases[0].cfg
    prompt_BT, len_B = padded([c.prompt for c in cases], cfg.max_prompt, B)
    s = start(
        params,
        prompt_BT,
        len_B,
        np.array([c.limit for c in cases] + [0] * (B - len(cases)), np.int32),
        np.zeros(B, np.float32),
        jax.random.split(jax.random.key(0), B),
        model=model,
        cfg=SamplerConfig(
            block=cfg.block,
            steps_per_block=1,
            max_prompt=cfg.max_prompt,
            max_new=cfg.max_new,
        ),
    )
    f = facts(cases[0])
    while s.live_B.any():
        draws, count = cases[0].draws, int(s.steps_B[0])
        if draws and count < len(draws):  # beyond them it only keeps keys
            f = f.replace(token_W=np.array(draws[count], np.int32))
        s = step(params, s, f, model=model, block=cfg.block)
    return jax.device_get(s)


@pytest.mark.parametrize(
    "path",
    [
        *("sdar/engine.json", "sdar/generate.json"),
        # A tied head without `make soak` is transformer_test's.
        pytest.param("sdar_tied/generate.json", marks=pytest.mark.soak),
    ],
)
def test_trajectories_of_the_reference(path, monkeypatch):
    monkeypatch.setitem(STRATEGIES, "any", Strategy(any_strategy))
    model, params = hf.load(reader.checkpoint(path.split("/")[0]))
    model = dataclasses.replace(model, dtype="float32")
    groups, every = collections.defaultdict(list), read(path)
    for case in every:
        groups[case.cfg, case.token, case.draws and case.name].append(case)
    same = 0
    for group in groups.values():
        for at in range(0, len(group), B):
            cases = group[at : at + B]
            s = run(params, cases, model=model)
            for row, case in enumerate(cases):
                first = len(case.prompt)
                span = slice(first, first + s.len_B[row])
                # Nobody's prompt is touched, whatever the reference did.
                assert s.tokens_BT[row, :first].tolist() == case.prompt, case.name
                assert (s.step_BT[row, :first] == GIVEN).all(), case.name
                assert s.len_B[row] > 0, case.name
                if case.bug:
                    continue
                assert s.tokens_BT[row, span].tolist() == case.answer, case.name
                assert s.step_BT[row, span].tolist() == case.steps, case.name
                if case.forwards:
                    assert (s.steps_B[row], s.forwards_B[row]) == case.forwards
                same += 1
    assert same > len(every) / 2


# --- The definition -------------------------------------------------------------------

BASE = SamplerConfig(block=4, max_prompt=12, max_new=12, stop_ids=(3, 19, 20, 14, 0))
CONFIGS = {
    "sequential": dataclasses.replace(BASE, strategy="sequential", steps_per_block=2),
    "static": dataclasses.replace(
        BASE, strategy="static", steps_per_block=3, top_k=9, top_p=0.9
    ),
    "dynamic": dataclasses.replace(BASE, strategy="dynamic", threshold=0.5),
    "entropy_bounded": dataclasses.replace(
        BASE, strategy="entropy_bounded", entropy_bound=2.5
    ),
}
MASK, STOP = 66, 3  # `tiny`'s mask id; one of the stop ids, of which 0 is what pads
RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(30, 66, n).tolist() for n in (3, 4, 6, 9, 11, 1, 12)]
PROMPTS[2][-1] = STOP  # in the prompt's last, partial block
PROMPTS[3][2] = PROMPTS[3][-1] = PROMPTS[4][5] = MASK
NEW = [12, 9, 5, 7, 13, 12, 1]  # limits inside blocks, at their ends, at the last slot
TEMPERATURES = [0, 1, 0, 1, 0.7, 1, 0]


def batch(order=(0, 1, 2, 3, 4, 5, 6), seed=0):
    """Returns the arguments of `generate`: rows in some order, -1 for a filler."""
    order = [*order, *[-1] * B][:B]
    prompt_BT, len_B = padded([PROMPTS[i] if i >= 0 else [] for i in order], 12)
    return {
        "prompt_BT": prompt_BT,
        "prompt_len_B": len_B,
        "limit_B": len_B + np.array([NEW[i] if i >= 0 else 0 for i in order], "i"),
        "temperature_B": np.array([TEMPERATURES[i] for i in order], np.float32),
        "key_B": row_keys(jax.random.key(seed), np.array(order, np.int32)),
    }


@functools.cache
def program(model, cfg):
    """Returns `generate` compiled for a batch, from its parameters on."""
    params = jax.eval_shape(lambda: transformer.init(jax.random.key(0), model))
    lowered = denoise.generate.lower(params, **batch(), model=model, cfg=cfg)
    return lowered.compile()


@functools.partial(jax.jit, static_argnames=("model", "cfg"))
def look(params, shown_T, at, masked_W, quota, temperature, key, *, model, cfg):
    """Returns (draw, take) of a window of one whole canvas, without a cache."""
    pos_BT = jnp.arange(cfg.slots)[None]
    x_BTD = transformer.embed(params, shown_T[None], model)
    blocks = mask.block(pos_BT, cfg.block)
    x_BTD, *_ = transformer.trunk(params, x_BTD, pos_BT, blocks, model)
    x_BWD = jax.lax.dynamic_slice_in_dim(x_BTD, at, cfg.block, axis=1)
    x_BWV = transformer.logits(params, x_BWD, model)
    drawn = logits.draw(key[None], x_BWV, temperature[None], cfg)
    take = STRATEGIES[cfg.strategy].take(drawn, masked_W[None], quota[None], cfg)
    return jax.tree.map(lambda x: x[0], (drawn, take))


def define(params, prompt, limit, temperature, key, *, model, cfg):
    """What `generate` means: one row, one forward of all of its canvas per step."""
    tokens_T, step_T = np.zeros(cfg.slots, np.int32), np.full(cfg.slots, FAR)
    logp_T, conf_T = np.zeros(cfg.slots), np.zeros(cfg.slots)
    first, count = len(prompt), 0
    tokens_T[:first], step_T[:first] = prompt, GIVEN
    for at in range(first // cfg.block * cfg.block, cfg.slots, cfg.block):
        window, quotas = np.s_[at : at + cfg.block], iter(cfg.schedule)
        while (masked_W := step_T[window] == FAR).any():
            drawn, take_W = look(
                params,
                np.where(step_T == FAR, model.mask_id, tokens_T),
                at,
                masked_W,
                np.int32(next(quotas, 1)),
                np.float32(temperature),
                jax.random.fold_in(key, count),
                model=model,
                cfg=cfg,
            )
            count += 1
            for i in np.flatnonzero(take_W):
                tokens_T[at + i], step_T[at + i] = drawn.token_BW[i], count
                logp_T[at + i], conf_T[at + i] = drawn.logp_BW[i], drawn.conf_BW[i]
            end = end_of(tokens_T, step_T, first, limit, cfg.stop_ids)
            if end is not None:
                return tokens_T, step_T, logp_T, conf_T, end - first, count


@pytest.mark.parametrize("strategy", sorted(CONFIGS))
def test_generate_is_what_it_means(tiny, strategy):
    (model, params), cfg, arrays = tiny, CONFIGS[strategy], batch()
    trace = jax.device_get(program(model, cfg)(params, **arrays))
    for row, prompt in enumerate(PROMPTS):
        tokens_T, step_T, logp_T, conf_T, length, count = define(
            params,
            prompt,
            int(arrays["limit_B"][row]),
            TEMPERATURES[row],
            arrays["key_B"][row],
            model=model,
            cfg=cfg,
        )
        np.testing.assert_array_equal(trace.tokens_BT[row], tokens_T)
        np.testing.assert_array_equal(trace.step_BT[row], step_T)
        np.testing.assert_allclose(trace.logp_BT[row], logp_T, atol=1e-4)
        np.testing.assert_allclose(trace.conf_BT[row], conf_T, atol=1e-4)
        assert (trace.len_B[row], trace.steps_B[row]) == (length, count)
        last = tokens_T[len(prompt) + length - 1]
        assert trace.stopped_B[row] == (last in cfg.stop_ids)
        # Beside its steps: a forward for the prompt, one to keep each block but the
        # last.
        start = len(prompt) // cfg.block
        blocks = -(-(len(prompt) + length) // cfg.block) - start
        assert trace.forwards_B[row] == count + blocks - 1 + (start > 0)
    # Stop ids and limits fall inside blocks, and blocks are left behind.
    inside_B = (trace.prompt_len_B + trace.len_B) % cfg.block != 0
    assert (inside_B & trace.stopped_B).any()
    assert (inside_B & ~trace.stopped_B).any()
    assert trace.len_B.max() >= 12


# --- What rows do not share -----------------------------------------------------------


def same(trace, row, other, at):
    """Asserts that a row of one trace is a row of another one."""
    for name in ("tokens_BT", "step_BT", "len_B", "steps_B", "forwards_B", "stopped_B"):
        a, b = getattr(trace, name)[row], getattr(other, name)[at]
        np.testing.assert_array_equal(a, b, err_msg=name)
    for name in ("logp_BT", "conf_BT"):
        a, b = getattr(trace, name)[row], getattr(other, name)[at]
        np.testing.assert_allclose(a, b, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("strategy", ["dynamic", "static"])
def test_rows_are_independent(tiny, strategy):
    (model, params), cfg = tiny, CONFIGS[strategy]
    sample = program(model, cfg)
    together = jax.device_get(sample(params, **batch()))
    orders = [[6, 2, -1, 5, 0, 3, 1, 4], *([-1] * i + [i] for i in range(7))]
    for order in orders:
        arrays = batch(order)
        # What lies beyond a prompt, and a filler's key and limit, are nobody's
        # business.
        beyond_BT = np.arange(12)[None] >= arrays["prompt_len_B"][:, None]
        arrays["prompt_BT"] = np.where(beyond_BT, 31, arrays["prompt_BT"])
        arrays["limit_B"] = np.where(
            arrays["prompt_len_B"] == 0, 20, arrays["limit_B"]
        ).astype(np.int32)
        other = jax.device_get(sample(params, **arrays))
        for at, row in enumerate([*order, *[-1] * B][:B]):
            if row >= 0:
                same(together, row, other, at)
            else:
                assert other.len_B[at] == other.forwards_B[at] == 0
                assert not other.stopped_B[at]
    # Another key is another answer, but not at temperature 0.
    redrawn = jax.device_get(sample(params, **batch(seed=1)))
    same(together, 0, redrawn, 0)
    assert (together.tokens_BT[5] != redrawn.tokens_BT[5]).any()


def test_one_row_watched_as_it_fills(tiny, monkeypatch):
    model, params = tiny
    together = program(model, CONFIGS["dynamic"])(params, **batch())
    cfg = dataclasses.replace(CONFIGS["dynamic"], rows=1)  # a program of its own
    monkeypatch.setattr(denoise, "step", chex.assert_max_traces(denoise.step, n=1))
    for row in (1, 5):
        arrays = {name: x[row : row + 1] for name, x in batch().items()}
        s = denoise.start(params, **arrays, model=model, cfg=cfg)
        while s.live_B[0]:
            before = jax.device_get((s.tokens_BT, s.step_BT, s.steps_B))
            s = denoise.advance(params, s, model=model, cfg=cfg)
            after = jax.device_get((s.tokens_BT, s.step_BT, s.steps_B))
            known_BT = before[1] != FAR
            new_BT = after[1] != before[1]
            # Known tokens stay; the new ones carry the number of the step that drew
            # them.
            assert (after[0] == before[0])[known_BT].all()
            assert not (new_BT & known_BT).any()
            assert (after[1][new_BT] == after[2][0]).all()
            assert new_BT.any() == (after[2] > before[2])[0]
        same(together, row, state.trace(s, cfg.stop_ids), 0)


@pytest.mark.parametrize("strategy", sorted(CONFIGS))
def test_masked_is_a_state_and_not_a_token(tiny, strategy):
    (model, params), cfg = tiny, CONFIGS[strategy]
    trace = jax.device_get(program(model, cfg)(params, **batch()))
    for row, prompt in enumerate(PROMPTS):
        first, length = len(prompt), trace.len_B[row]
        # Given tokens stay: mask ids among them, and where a step may unmask more
        # positions than are masked. A stop id in the prompt's last block ends nothing.
        assert trace.tokens_BT[row, :first].tolist() == prompt
        assert (trace.step_BT[row, :first] == GIVEN).all()
        assert length > 0
        assert (trace.step_BT[row, first : first + length] > GIVEN).all()
        assert (trace.step_BT[row, first : first + length] < FAR).all()
        assert MASK not in trace.tokens_BT[row, first:]
    assert any(MASK in p[len(p) // 4 * 4 :] for p in PROMPTS)
    assert any(STOP in p[len(p) // 4 * 4 :] for p in PROMPTS)


def test_the_mask_id_is_never_an_answer(tiny):
    (model, params), cfg = tiny, CONFIGS["dynamic"]
    sample = program(model, cfg)
    trace = jax.device_get(sample(params, **batch()))
    # An arg-max has a positive logit here, and so the mask id a much larger one.
    best = trace.tokens_BT[0, len(PROMPTS[0])]
    loud = 100 * params["head"][:, best]
    params = {**params, "head": params["head"].at[:, MASK].set(loud)}
    unmoved = jax.device_get(sample(params, **batch()))
    jax.tree.map(np.testing.assert_array_equal, trace, unmoved)


def test_one_trace_for_all_prompts_limits_and_temperatures(tiny, monkeypatch):
    model, params = tiny
    cfg = dataclasses.replace(CONFIGS["dynamic"], rows=2)  # a program of its own
    quick = program(model, CONFIGS["dynamic"])
    quick(params, **batch(np.arange(7), 0))  # traced before traces are counted
    monkeypatch.setattr(denoise, "step", chex.assert_max_traces(denoise.step, n=1))
    for seed in range(3):
        arrays = batch(np.random.default_rng(seed).permutation(7), seed)
        arrays["temperature_B"] = np.full(B, seed, np.float32)
        trace = denoise.generate(params, **arrays, model=model, cfg=cfg)
        same(quick(params, **arrays), slice(None), trace, slice(None))


# --- The mesh -------------------------------------------------------------------------

# Without top_k, for which XLA gathers the rows on CPU alone.
ON_MESH = dataclasses.replace(CONFIGS["dynamic"], top_p=0.9)


@pytest.fixture(scope="module")
def on_mesh(tiny):
    """Returns a cached function: mesh sizes -> (trace, parameters, arrays, program).

    The vocabulary is padded from 67 to 72, which axes of 2 and of 8 divide.
    """
    model, params = tiny
    model = dataclasses.replace(model, vocab=72)
    host = {
        **params,
        "embed": np.pad(params["embed"], ((0, 5), (0, 0))),
        "head": np.pad(params["head"], ((0, 0), (0, 5))),
    }

    @functools.cache
    def sample(sizes):
        mesh = sharding.make_mesh(
            **dict(zip(sharding.AXES, sizes)), devices=jax.devices()[: np.prod(sizes)]
        )

        def place(x, spec):
            return sharding.place(
                x, sharding.pspec(spec.dims, x.shape, sharding.PARAM, mesh), mesh
            )

        with jax.set_mesh(mesh):
            params = jax.tree.map(place, host, transformer.specs(model))
            arrays = {k: x for k, x in batch().items() if k != "key_B"}
            index_B = np.array([0, 1, 2, 3, 4, 5, 6, -1], np.int32)
            arrays, index_B = sharding.place_rows((arrays, index_B), mesh)
            arrays["key_B"] = row_keys(jax.random.key(0), index_B)
            lowered = denoise.generate.lower(params, **arrays, model=model, cfg=ON_MESH)
            program = lowered.compile()
            trace = sharding.fetch(program(params, **arrays))
        return trace, params, arrays, program

    return sample


SHAPES = pytest.param((8, 1, 1), marks=pytest.mark.soak), (2, 2, 2)


@pytest.mark.parametrize("sizes", SHAPES, ids=str)
def test_a_mesh_changes_nothing(on_mesh, sizes):
    alone, *_ = on_mesh((1, 1, 1))
    trace, params, arrays, program = on_mesh(sizes)
    for name in ("tokens_BT", "step_BT", "len_B", "steps_B", "forwards_B", "stopped_B"):
        a, b = getattr(alone, name), getattr(trace, name)
        np.testing.assert_array_equal(a, b, err_msg=name)
    np.testing.assert_allclose(alone.logp_BT, trace.logp_BT, atol=1e-4)
    np.testing.assert_allclose(alone.conf_BT, trace.conf_BT, atol=1e-4)
    assert alone.len_B.sum() > 20

    # Really split: matrices over fsdp and model, rows over data and fsdp.
    data, fsdp, model = sizes
    for x in (params["layers"]["wq"], params["layers"]["wk"], params["head"]):
        assert x.addressable_shards[0].data.size * fsdp * model == x.size
    assert arrays["prompt_BT"].addressable_shards[0].data.shape[0] * data * fsdp == B
    # Rows never meet: where only they are split, no device waits for another's.
    if sizes == (8, 1, 1):
        text = program.as_text()
        assert "all-gather" not in text and "all-to-all" not in text


# --- What never ends, and what is no number -------------------------------------------


def answerers(tiny, **changes):
    """Returns both answerers of a strategy that takes nothing, and the weights."""
    model, params = tiny
    cfg = dataclasses.replace(BASE, rows=2, page=4, prefill=4, **changes)
    mesh = sharding.make_mesh(fsdp=1, devices=jax.devices()[:1])
    made = {
        "batches": answers.Batches(model=model, cfg=cfg, mesh=mesh),
        "engine": engine.Engine(model=model, cfg=cfg, mesh=mesh),
    }
    return made, params


@pytest.mark.parametrize(
    "platform, int8, on_gpu",
    [("gpu", False, True), ("gpu", True, False), ("cpu", False, False)],
)
def test_a_gpu_has_a_program_of_its_own_but_for_int8(platform, int8, on_gpu):
    cfg = dataclasses.replace(BASE, int8=int8)
    assert denoise.loop_on(platform, cfg, False, True) == on_gpu


@pytest.mark.parametrize(
    ("kind", "cache"), [("batches", "auto"), ("engine", "auto"), ("engine", "none")]
)
def test_rows_that_never_end_are_stopped_within_a_turn(
    tiny, one_width, kind, cache, monkeypatch
):
    never = Strategy(lambda draw, masked_BW, quota_B, cfg: masked_BW & False)
    monkeypatch.setitem(STRATEGIES, "never", never)
    made, params = answerers(tiny, strategy="never", max_new=300, cache=cache)
    forwards = []
    advance = made[kind].loop

    def counted(params, rows, *args, **static):
        rows = advance(params, rows, *args, **static)
        forwards.append(int(rows.steps_B.max() if kind == "batches" else rows.forwards))
        return rows

    if kind == "batches":
        monkeypatch.setattr(made[kind], "loop", counted)
    else:
        monkeypatch.setattr(engine.Engine, "loop", property(lambda made: counted))
    how = {"key": jax.random.key(0), "temperature": 1.0}
    stream = functools.partial(made[kind].stream, params, PROMPTS[:3], **how)
    assert list(stream(stop=lambda: True)) == []
    assert forwards == [denoise.TURN]
    if cache == "none":  # half of them are of canvases
        return
    with pytest.raises(RuntimeError, match=r"request \d|rows \[0, 1\]"):
        list(stream())  # nobody stops it: the schedule does
    assert forwards[-1] - forwards[0] <= made[kind].cfg.most_forwards + denoise.TURN


@pytest.mark.parametrize("kind", ["batches", "engine"])
def test_each_prompt_may_have_an_answer_of_its_own_length(tiny, one_width, kind):
    made, params = answerers(tiny, strategy="dynamic", threshold=0.5)
    stream = functools.partial(made[kind].stream, params, PROMPTS[:3], temperature=1.0)
    most = made[kind].cfg.max_new
    want = dict(stream(jax.random.key(0)))
    same = dict(stream(jax.random.key(0), new=[most] * 3))
    for i, answer in want.items():
        jax.tree.map(np.testing.assert_array_equal, same[i], answer)
    short = dict(stream(jax.random.key(0), new=[1, 3, most]))
    for i, new in enumerate([1, 3, most]):
        length = min(new, int(want[i].len))
        assert short[i].len == length
        first = int(short[i].prompt_len)
        span = slice(first, first + length)
        np.testing.assert_array_equal(short[i].tokens_T[span], want[i].tokens_T[span])
    assert short[0].forwards < want[0].forwards
    for new in ([0, 1, 1], [1, 1, most + 1], [1]):
        with pytest.raises(ValueError, match=f"in 1..{most} for each of 3 answers"):
            list(stream(jax.random.key(0), new=new))


@pytest.mark.parametrize("kind", ["batches", "engine"])
def test_prompts_that_make_no_sense_are_refused_and_leave_nothing(
    tiny, one_width, kind
):
    made, params = answerers(tiny, strategy="dynamic", threshold=0.5)
    stream = functools.partial(made[kind].stream, params, key=jax.random.key(0))
    want = dict(stream(PROMPTS[:2], temperature=1.0))
    for prompt, temperature, words in (
        ([67], 1.0, r"\[67\].*in 0..66"),
        ([-1], 1.0, r"\[-1\].*in 0..66"),
        ([10], -1.0, "temperature=-1.0: a number, 0 or >= 1e-6"),
        ([10], float("nan"), "temperature=nan"),
    ):
        with pytest.raises(ValueError, match="a request needs .*" + words):
            dict(stream([PROMPTS[0], prompt], temperature=temperature))
    # Of what was refused nothing waits.
    again = dict(stream(PROMPTS[:2], temperature=1.0))
    for i, answer in want.items():
        jax.tree.map(np.testing.assert_array_equal, again[i], answer)


@pytest.mark.parametrize("kind", ["batches", "engine"])
def test_a_row_that_meets_nan_ends_at_once_and_alone(tiny, one_width, kind):
    made, params = answerers(tiny, strategy="dynamic", threshold=0.5)
    bad = {**params, "embed": params["embed"].at[41].set(np.nan)}
    how = {"key": jax.random.key(0), "temperature": 1.0}
    asked = [PROMPTS[0], PROMPTS[1], PROMPTS[3]]  # 41 is a token of the second
    want = dict(made[kind].stream(params, asked, **how))
    got = dict(made[kind].stream(bad, asked, **how))
    assert got[1].bad and got[1].len == 0 and not got[1].stopped
    assert got[1].forwards <= 2  # its prompt's, and the first of its answer
    for i in (0, 2):
        assert not got[i].bad and got[i].len == want[i].len > 0
        np.testing.assert_array_equal(got[i].tokens_T, want[i].tokens_T)
    again = dict(made[kind].stream(params, asked, **how))  # no page keeps a NaN
    for i, answer in want.items():
        jax.tree.map(np.testing.assert_array_equal, again[i], answer)
