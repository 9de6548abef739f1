"""Prompts with images in, answers out: an answerer before another.

Its parameters are those that sample, and under LOOK what makes rows of a table: projector,
newline and, where it is trained, the tower. It puts the prompts' images into tables, as few
as hold them, and lets the other answer the prompts of each with params["soft"].
"""

from dllm_jax.models import acting
from dllm_jax.models.vision import look, soft

LOOK = "look"


def parts(params) -> dict:
    """Returns what of a model's parameters makes rows of a table."""
    return {
        name: params[name] for name in (*soft.PARAMETERS, "vision") if name in params
    }


class Looking:
    """An answerer (sampling/answers.py) of prompts with images, and of others."""

    def __init__(self, answerer, eyes: look.Eyes):
        self.answerer, self.eyes, self.mesh = answerer, eyes, answerer.mesh
        self.place = acting.abstract(eyes.model, self.mesh)["soft"]

    def stream(
        self, params, prompts, key, *, temperature, new=None, watch=None, stop=None
    ):
        """Yields (i, Answer i), table by table: see sampling/answers.py."""
        params = dict(params)
        made_of, vocab = params.pop(LOOK), self.eyes.model.vocab
        for chunk in self.eyes.chunks(prompts):
            table = self.eyes.look([prompts[i] for i in chunk])
            rows_MD = look.rows(made_of, table.seen, cfg=self.eyes.model)
            shown = params | {"soft": acting.copied(rows_MD, None, self.place)}
            # A prompt's number decides its draws: those of other tables leave gaps.
            placed = [[]] * len(prompts)
            for i in chunk:
                placed[i] = table.placed(prompts[i], vocab)
            answered = self.answerer.stream(
                shown,
                placed,
                key,
                temperature=temperature,
                new=new,
                watch=watch,
                stop=stop,
            )
            mine = set(chunk)
            yield from ((i, answer) for i, answer in answered if i in mine)
            if stop is not None and stop():
                return

    def release(self):
        """Drops what is kept between calls: see sampling/answers.py."""
        self.answerer.release()

    def lower(self, params):
        """Returns the program that samples, lowered: see sampling/answers.py."""
        return self.answerer.lower(params)
