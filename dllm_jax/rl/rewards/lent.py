"""A judge that is a checkpoint: sampled by the engine, on the devices of the run.

Its weights and pages lie there beside the policy's for the whole run, and the plan of the
run's memory counts them. They are loaded when it is first asked, which is after the run was
found to fit. One process alone: each would ask other questions.

Where the checkpoint looks at images itself, a question's are in its prompt as in any other of
its prompts; where it does not it reads the question's text alone.
"""

import collections
import dataclasses
import zlib

import jax

from dllm_jax import data, memory
from dllm_jax.models import families, hf, repository, transformer
from dllm_jax.models.vision import codes, look, prompts
from dllm_jax.rl.rewards.endpoint import TOP_P, UNREADABLE, Failed
from dllm_jax.sampling import answers, placement
from dllm_jax.sampling.config import SamplerConfig

# Tiles that a question's images have, about: those of 1024 x 768 pixels are seven.
TILES = 8
# The turns of a question, to find out whether a chat template writes them.
BLANK = [{"role": role, "content": f"{role}?"} for role in ("system", "user")]


class Lent:
    """Answers questions with a checkpoint. cfg: rl.config.JudgeConfig."""

    def __init__(self, cfg, *, looks: bool = False):
        """looks: whether questions may be about images."""
        self.cfg, self.looks = cfg, looks
        self.tok = self.model = self.place = self.answerer = self.params = None
        # What makes its prompts with images, None: it does not look; their codes.Format, or None.
        self.reader = self.format = None

    def begin(self) -> list[str]:
        """Reads what the checkpoint is; returns what is to be said of it.

        Raises ValueError for one that cannot be read, and where there are many processes.
        """
        cfg = self.cfg
        if jax.process_count() > 1:
            raise ValueError(
                f"reward.judge.at={cfg.at!r}: a checkpoint judges in a run of one process; "
                "serve it over HTTP, and name the URL"
            )
        path = repository.find(cfg.at)
        model = families.adapt(hf.read_config(path), attention="", shift=-1, mask_id=-1)
        tiles = max(TILES * cfg.rows, 40) if model.vision and self.looks else 0
        self.model = dataclasses.replace(model, dtype="bfloat16", tiles=tiles)
        hf.check(path, self.model)
        self.tok = data.tokenizer(path)
        try:  # before a step is sampled
            data.render(self.tok, BLANK)
        except ValueError as error:
            raise ValueError(f"reward.judge.at={cfg.at!r}: {error}") from None
        lines = [f"judge: the checkpoint {cfg.at}, {cfg.votes} votes"]
        if 0 < model.positions < cfg.prompt + cfg.tokens:
            lines.append(
                f"warning: reward.judge.prompt={cfg.prompt} and tokens={cfg.tokens}: the "
                f"judge was made for {model.positions} positions (max_position_embeddings): "
                "beyond them it guesses"
            )
        if self.looks:
            lines.append(self.look(path))
        return lines

    def look(self, path) -> str:
        """Makes what reads images for the checkpoint in this folder; says what it sees."""
        why, model = "has no vision tower and no codes of images", self.model
        if model.soft:
            self.reader = prompts.Reader(model)
        elif model.codebook:
            try:
                self.format = codes.format_of(
                    path, self.tok, model.vocab, model.codebook, vq="", size=0
                )
                self.reader = codes.Reader(lambda: codes.Codec(self.format))
            except ValueError as error:
                why = str(error)
        if self.reader:
            return "the judge is shown the images that a question is about"
        return f"the judge is shown no images, but the question's text: {path} {why}"

    def claim(self, beside: int, slots: int) -> memory.Claim:
        """Takes its place on the mesh in force; returns what it takes: see Grader.claim."""
        cfg = self.cfg
        sampler = SamplerConfig(
            block=self.model.block,
            temperature=cfg.temperature,
            top_p=TOP_P,
            max_prompt=cfg.prompt,
            max_new=cfg.tokens,
            rows=cfg.rows,
            stop_ids=data.stop_ids(self.tok, self.model.eos_id, *self.model.ends),
        )
        self.place = placement.place(
            model=self.model,
            cfg=sampler,
            mesh=jax.sharding.get_mesh(),
            beside=beside,
            limit=memory.device_bytes(),
        )
        lowered, between_calls = self.place.answerer.lower(self.place.weights)
        always = {
            "judge": memory.array_bytes(self.place.weights),
            "its rows and pages": memory.array_bytes(between_calls),
        }
        if self.model.soft:
            mesh = jax.sharding.get_mesh()
            parts = transformer.abstract(self.model, mesh, "bfloat16", ("vision",))
            shown = parts["vision"], look.abstract(self.model, mesh)
            always["its tower and images"] = memory.array_bytes(shown)
        own = memory.Claim(always, {"judge": memory.program_bytes(lowered.compile())})
        reads = self.format.claim(draws=False) if self.format else memory.NOTHING
        return memory.claimed([lambda _: own, lambda _: reads], 0)

    def load(self):
        """Loads the weights to where `claim` said."""
        if self.place is None:
            self.claim(0, 0)
        self.answerer, self.params = placement.filled(
            repository.find(self.cfg.at),
            self.place,
            model=self.model,
            mesh=jax.sharding.get_mesh(),
        )

    def prompt(self, messages: list[dict], files: tuple) -> list[int]:
        """Returns a question's prompt; raises Failed where there can be none.

        files: of its images the path, and the mark of the pixels.
        """
        shown = None
        try:
            if self.reader is not None and files:
                shown = self.reader.of_files([file for file, _ in files], None)
                if [x.mark for x in shown.pictures] != [mark for _, mark in files]:
                    raise Failed(UNREADABLE)
            return data.render(self.tok, messages, shown)
        except data.Unreadable:
            raise Failed(UNREADABLE) from None
        except ValueError as error:  # too many images, or what no template writes
            raise Failed(str(error)) from None

    def answers(self, conversations: list[list[dict]], files: list[tuple]):
        """Returns (the text that answers each, or None; a Counter of the reasons for None).

        files: of each conversation the images that it is about: Question.images. The draws
        are a function of the questions, so that a run that is resumed goes on as if it had
        not stopped.
        """
        asked, reasons = [], collections.Counter()
        for messages, seen in zip(conversations, files, strict=True):
            try:
                asked.append(self.prompt(messages, seen))
            except Failed as failure:
                asked.append([])
                reasons[str(failure)] += 1
        if not asked:
            return [], reasons
        if self.params is None:
            self.load()
        stream = self.answerer.stream(
            self.params,
            asked,
            jax.random.key(zlib.crc32(repr(asked).encode())),
            temperature=self.cfg.temperature,
        )
        trace = answers.collect(stream, len(asked))
        texts = answers.decode(trace, self.tok)
        told = trace.len_B > 0
        if unsaid := int((~told).sum()) - reasons.total():
            reasons["longer than reward.judge.prompt, or not finite"] = unsaid
        pairs = zip(texts, told.tolist(), strict=True)
        return [text if ok else None for text, ok in pairs], reasons
