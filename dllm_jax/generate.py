"""Answers prompts with a diffusion language model.

    python -m dllm_jax.generate --model=DIR "How many legs has a spider?"
    python -m dllm_jax.generate --model=DIR --prompts=FILE.jsonl --out=FILE.jsonl

A prompt on the command line is shown while it is unmasked, where the output is a
terminal. A line of a prompts file holds `prompt` or `question` (text, taken as the user's
turn), `messages` (a conversation) or `prompt_ids` (token ids: no tokenizer is needed); the
line written for it holds prompt_ids, response_ids, step_map (the denoising step at which
each token was unmasked, from 1), logprobs (nats), confidence, forwards, finished ("stop" or
"length") and text.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import sys

import jax
from tqdm import tqdm

from dllm_jax import config, data, pallas_kernels, sharding
from dllm_jax.models import hf
from dllm_jax.models.mask import FAR
from dllm_jax.sampling import answers, state
from dllm_jax.sampling.confidence import TARGETS
from dllm_jax.sampling.config import SamplerConfig
from dllm_jax.sampling.policy import POLICIES
from dllm_jax.sampling.strategy import STRATEGIES

SAMPLER = {  # a field of SamplerConfig: what its flag says
    "block": "0: the checkpoint's",
    "steps_per_block": "0: a token a step",
    "strategy": "which tokens a step unmasks",
    "threshold": "of --strategy=dynamic",
    "tempered_threshold": "it is of what is drawn from, as dLLM-RL compares",
    "entropy_bound": "nats, of --strategy=entropy_bounded",
    "target": "the score that tokens are ranked by",
    "rank_temperature": "of drawing by score what is unmasked; 0: the best",
    "pad_penalty": "what the scores of padding are divided by",
    "cache": "which keys stay; auto: what the model allows",
    "horizon": "of --cache=prefix",
    "temperature": "0: arg-max",
    "top_k": "0: all tokens",
    "top_p": "1: all tokens",
    "rows": "prompts sampled together",
}
CHOICES = {
    "strategy": sorted(STRATEGIES),
    "target": sorted(TARGETS),
    "cache": ["auto", *POLICIES],
}


def parser() -> argparse.ArgumentParser:
    """Returns the command line."""
    p = argparse.ArgumentParser(
        prog="python -m dllm_jax.generate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument(
        "prompt", nargs="?", help="one prompt, on a terminal shown as it is unmasked"
    )
    p.add_argument("--model", required=True, help="a Hugging Face folder")
    p.add_argument("--prompts", help="a .jsonl file of prompts")
    p.add_argument("--out", help="where to write the answers; default: the terminal")
    p.add_argument("--max-new-tokens", type=int, default=256, help="of each answer")
    usual = SamplerConfig(block=0)
    for name, text in SAMPLER.items():
        flag, default = f"--{name.replace('_', '-')}", getattr(usual, name)
        how = {"type": type(default), "default": default, "choices": CHOICES.get(name)}
        how = {"action": "store_true"} if default is False else how
        p.add_argument(flag, help=f"{text} (default: %(default)s)", **how)
    p.add_argument("--seed", type=int, default=0, help="of all that is drawn")
    p.add_argument(
        "--stop-ids",
        type=lambda text: tuple(int(t) for t in text.split(",") if t),
        help="token ids, comma-separated; default: the model's",
    )
    kinds = ["bfloat16", "float32"]
    p.add_argument("--dtype", choices=kinds, default=kinds[0], help="of computation")
    kinds = pallas_kernels.CHOICES
    p.add_argument("--kernels", choices=kinds, default="auto", help="docs/kernels.md")
    p.add_argument("--model-parallel", type=int, default=1, help="devices per copy")
    return p


def read(path: str, tok, vocab: int) -> tuple[list[list[int]], list[dict]]:
    """Returns (prompt ids, the lines) of a prompts file.

    Raises ValueError naming the record that has none of these fields, and the one
    whose ids are not a list of ids below `vocab`.
    """
    rows = data.records(path)

    def ids(row):
        if "prompt_ids" in row:
            given = row["prompt_ids"]
            given = given if isinstance(given, list) else []
            if not given or not all(t in range(vocab) for t in given):
                raise ValueError(
                    f"prompt_ids must be one or more ids in 0..{vocab - 1}"
                )
            return given
        if tok is None:
            raise ValueError("the model has no tokenizer, so each needs prompt_ids")
        if "messages" in row:
            return data.render(tok, row["messages"])
        if asked := {"prompt", "question"} & row.keys():
            return data.render(tok, [{"role": "user", "content": row[min(asked)]}])
        raise ValueError(
            f"needs prompt, question, messages or prompt_ids, it has {sorted(row)}"
        )

    out = []
    for number, row in enumerate(rows, 1):
        with data.of_record(path, number):
            out.append(ids(row))
    return out, rows


def load_tokenizer(path: str):
    """Returns the folder's tokenizer, or None where it has none."""
    if any(name.startswith("tokenizer") for name in os.listdir(path)):
        return data.tokenizer(path)
    return None


def stream(answerer, params, prompt: list[int], args, *, cfg, tok):
    """Prints one canvas as it fills, then its answer."""
    first, clear = len(prompt), "\033[2J\033[H" if sys.stdout.isatty() else ""

    def show(_, start, answer):
        text = "".join(
            "░" if answer.step_T[i] == FAR else tok.decode([answer.tokens_T[i]])
            for i in range(first, min(start + cfg.block, first + cfg.max_new))
        )
        print(clear + text, flush=True)

    key, watch = jax.random.key(args.seed), show if clear else None
    ((_, answer),) = answerer.stream(
        params, [prompt], key, temperature=args.temperature, watch=watch
    )
    tokens = answer.tokens_T[first : first + answer.len]
    print(clear + tok.decode(tokens, skip_special_tokens=True))
    print(
        f"[{answer.len} tokens, {answer.forwards} forwards, "
        f"{answer.len / answer.forwards:.2f} tokens per forward]",
        file=sys.stderr,
    )


def main(argv=None):
    """Parses the command line and answers."""
    args = parser().parse_args(argv)
    if (args.prompt is None) == (args.prompts is None):
        raise ValueError("give either one prompt or --prompts=FILE.jsonl")
    if args.out:
        try:
            open(args.out, "a").close()
        except OSError as error:
            raise ValueError(f"--out={args.out}: {error.strerror}") from None
    sharding.keep_compiled(config.RunConfig().compile_cache)
    mesh = sharding.make_mesh(fsdp=1, data=-1, model=args.model_parallel)
    jax.set_mesh(mesh)
    tok = load_tokenizer(args.model) if os.path.isdir(args.model) else None
    model, params = hf.load(args.model, mesh=mesh, dtype=args.dtype, heads=("lm",))
    block = args.block or model.block
    model = dataclasses.replace(
        model, dtype=args.dtype, block=block, kernels=args.kernels
    )
    stops = args.stop_ids
    if stops is None:
        stops = data.stop_ids(tok, model.eos_id)
    told = {name: getattr(args, name) for name in SAMPLER} | {"block": block}
    cfg = SamplerConfig(**told, max_new=args.max_new_tokens, stop_ids=stops)
    if args.prompt is not None:
        if tok is None:
            raise ValueError(f"{args.model!r} has no tokenizer; use --prompts with ids")
        prompts = [data.render(tok, [{"role": "user", "content": args.prompt}])]
    else:
        prompts, rows = read(args.prompts, tok, model.vocab)
    longest = max(map(len, prompts))
    share = mesh.size // args.model_parallel
    cfg = dataclasses.replace(
        cfg,
        max_prompt=-(-longest // block) * block,
        rows=-(-min(args.rows, len(prompts)) // share) * share,
    )
    answerer = answers.answerer(model=model, cfg=cfg, mesh=mesh)
    if args.prompt is not None:
        stream(answerer, params, prompts[0], args, cfg=cfg, tok=tok)
        return
    quiet = not sys.stderr.isatty()
    key, done, written = jax.random.key(args.seed), {}, 0
    with (
        open(args.out, "w") if args.out else contextlib.nullcontext(sys.stdout) as out,
        tqdm(total=len(prompts), unit="prompt", disable=quiet) as bar,
    ):
        stream_of = answerer.stream(params, prompts, key, temperature=args.temperature)
        for i, answer in stream_of:
            done[i] = answer
            bar.update(1)
            while written in done:  # in the order of the input
                answer = done.pop(written)
                text = answers.decode(state.stacked([answer]), tok)[0] if tok else None
                line = {**answers.record(answer, prompts[written]), "text": text}
                if "id" in rows[written]:
                    line["id"] = rows[written]["id"]
                out.write(json.dumps(line, ensure_ascii=False) + "\n")
                out.flush()
                written += 1


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        config.fail(error)
