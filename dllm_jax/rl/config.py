"""How to train; every field is documented here and nowhere else."""

import dataclasses
import re

from dllm_jax import checks
from dllm_jax.rl import advantage, rewards
from dllm_jax.rl.noise import KINDS, PICKS
from dllm_jax.rl.objectives import KL_ESTIMATORS, RL_LOSSES
from dllm_jax.rl.optim import SCHEDULES
from dllm_jax.rl.rewards import endpoint, process
from dllm_jax.rl.views import AGGREGATES

NETWORKS = ("own", "head")  # values that a network tells
VALUES = ("none", *NETWORKS, "trace")
# What becomes of an answer that was cut at its limit. wrong: it earns nothing. graded: what
# its grader says. soft: that, less what its length costs (advantage.overlong). mask: it
# leaves its group, which is compared without it.
TRUNCATED = ("wrong", "graded", "soft", "mask")


@dataclasses.dataclass(frozen=True)
class NoiseConfig:
    """Which tokens are masked together, and which of them are supervised."""

    # A key of noise.KINDS. trace: the steps of sampling. bernoulli: at random.
    # complement: at random, and then what that left out (coupled RL). semi_ar: at
    # random in one block, with all later ones masked. subset: of each scope's answer
    # tokens so many, at random, as a uniform draw from 1 to all of them says. quadrature:
    # as many as the levels of a quadrature of `draws` points over the mask rate say. end:
    # an answer's last token, for reward models. left_to_right: a token each round, with
    # those behind it. ar: nothing; each token is predicted from those before it. A *scope* is a block, or the whole answer where the model's
    # attention is full.
    kind: str = "trace"
    draws: int = 1  # of random kinds, for each trajectory of an update
    shrink: int = 1  # trace: this many neighbouring steps of a scope become one round
    # trace, left_to_right: rounds of an answer that are trained on, with weights for the
    # others; 0: all.
    rounds: int = 0
    pick: str = "uniform"  # which: "uniform", or by "surprise", -log p of their tokens
    # Random kinds but subset: a masking probability is drawn from the uniform
    # distribution over [lower, upper] for each "token", or for each "scope".
    rate: str = "token"
    lower: float = 0.1
    upper: float = 0.9
    grid: str = "absolute"  # "response": blocks counted from the answer's first token
    # Of models that attend by blocks: the size of the blocks that are trained, such as
    # twice sampler.block; trace: a multiple of it. 0: the sampler's.
    block: int = 0
    # Of answers drawn with sampler.guidance: the loss scores both branches. False: the one
    # with the prompt alone, in half the slots, and old log-probs are its own. In
    # SFT, of answers that nobody drew, the program chooses that.
    guided: bool = True

    @property
    def as_traced(self) -> bool:
        """Whether it is the trace as it is: what a token was sampled in, it is shown in."""
        return (self.kind, self.shrink, self.grid) == ("trace", 1, "absolute")

    def __post_init__(self):
        checks.fields(
            self,
            kind=tuple(KINDS),
            draws=">= 1, <= 1024",
            shrink=">= 1",
            rounds=">= 0",
            pick=tuple(PICKS),
            rate=("token", "scope"),
            lower=">= 0",
            upper="> 0, <= 1",
            block=">= 0",
            grid=("absolute", "response"),
        )
        if self.lower > self.upper:
            raise checks.Refused("lower", f"={self.lower}: above upper={self.upper}")
        if self.rounds and not KINDS[self.kind].ordered:
            raise ValueError(
                f"noise.rounds={self.rounds}: rounds are picked of noise.kind='trace' or "
                f"'left_to_right', not {self.kind!r}; set it to 0"
            )
        if self.draws > 1 and not KINDS[self.kind].random:
            raise ValueError(
                f"noise.draws={self.draws}: a trajectory has one {self.kind}; more "
                "than one draw needs a random noise.kind, such as 'bernoulli' or "
                "'complement'"
            )

    @property
    def copies(self) -> int:
        """Rows of noise that a trajectory of an update has."""
        return self.draws * KINDS[self.kind].rows

    @property
    def whole(self) -> bool:
        """Whether the canvas of an answer ends with it."""
        return KINDS[self.kind].whole


@dataclasses.dataclass(frozen=True)
class ObjectiveConfig:
    """The losses and how tokens are weighed against each other."""

    # RL's, a key of objectives.OBJECTIVES. policy: ratios to the policy that sampled,
    # clipped. dipo: the gradient of log pi itself. spg: of bounds of log pi, an upper
    # one where the advantage is negative. sequence: ratios of whole answers, clipped
    # (objectives.clipped_answers). stable: spg, with weights of answers.
    loss: str = "policy"
    clip: float = 0.2  # epsilon of the clipped surrogate
    value_clip: float = -1.0  # that of the clipped value loss; 0: off; -1: `clip`
    clip_high: float = 0.0  # the surrogate's above 1 (clip-higher); 0: the same
    beta: float = 0.01  # weight of the KL to the policy that sampled
    # Weight of the KL to the first policy; 0: not loaded. DPO's beta.
    reference_beta: float = 0.0
    # RL: what it becomes, on a line over the run's steps; -1: it stays.
    reference_beta_final: float = -1.0
    upper_weight: float = 0.5  # spg: of the upper bound, beside the lower one
    upper_power: float = 1.5  # spg: the upper bound's exponent, at least 1
    # Estimator: "k3" (exp(-d) - 1 + d), "k2" (d^2 / 2) or "k1" (d, which pulls nowhere on
    # average while the policy is the one that sampled).
    kl: str = "k3"
    nll_weight: float = 0.0  # of -log p of right answers, beside RL's loss; 0: off
    # What a token's loss is divided by, a key of views.AGGREGATES. token: all
    # supervised tokens of the update. sequence: its answer's length, then answers.
    # step: its step's size, then answers. constant: the longest possible answer, then
    # answers. group: the steps of all answers of its group, then groups. elbo: all
    # answers' tokens, each divided by the probability that the noise masked it (1/p;
    # subset: n of l). elbo_sequence: so divided, then by its answer's length, then answers.
    # elbo_answer: so divided, then answers.
    aggregate: str = "token"
    entropy_bonus: float = 0.0  # weight of the mean entropy, which is raised; 0: none
    value_weight: float = 1.0  # of the value loss, where it shares the policy's trunk
    # What ratio, clip and aggregate are of. tokens: the log-prob of each. selection: the
    # probability of each step of the sampler, with all the draws that it threw away.
    likelihood: str = "tokens"
    # Largest weight of a token for how much likelier the trainer finds it than what it was
    # drawn from: temperature, filters, rounding, stale keys; 0: no weight, else >= 1.
    importance_cap: float = 0.0

    def __post_init__(self):
        checks.fields(
            self,
            loss=RL_LOSSES,
            clip="> 0",
            value_clip=">= -1",
            entropy_bonus=">= 0",
            clip_high=">= 0",
            beta=">= 0",
            reference_beta=">= 0",
            reference_beta_final=">= -1",
            upper_weight=">= 0, <= 1",
            upper_power=">= 1",
            kl=tuple(KL_ESTIMATORS),
            nll_weight=">= 0",
            aggregate=tuple(AGGREGATES),
            value_weight=">= 0",
            likelihood=("tokens", "selection"),
            importance_cap=">= 0",
        )
        if -1 < self.reference_beta_final < 0 or (
            self.reference_beta_final >= 0 and not self.reference_beta
        ):
            raise checks.Refused(
                "reference_beta_final",
                f"={self.reference_beta_final}: 0 or more, with objective.reference_beta "
                "above 0, from which it goes there; or -1, where that stays",
            )
        if -1 < self.value_clip < 0:
            raise checks.Refused(
                "value_clip",
                f"={self.value_clip}: 0 or more, 0 is off; or -1, objective.clip's",
            )
        if 0 < self.importance_cap < 1:
            raise checks.Refused(
                "importance_cap",
                f"={self.importance_cap}: the largest weight of a token, at least 1, such "
                "as 2; or 0, which is off",
            )
        if self.importance_cap and self.likelihood == "selection":
            raise ValueError(
                f"objective.importance_cap={self.importance_cap}: the sampler records no "
                "probability of its steps; set it to 0, or objective.likelihood='tokens'"
            )


@dataclasses.dataclass(frozen=True)
class OptimConfig:
    """AdamW with global-norm clipping and one schedule over the whole run."""

    lr: float = 1e-6
    schedule: str = "constant"  # after the warm-up: "constant", "linear" or "cosine"
    warmup: int = 0  # updates
    horizon: int = 0  # updates that linear and cosine decay over; 0: those of the run
    final: float = 0.0  # fraction of lr that linear and cosine end at
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0  # of weights: never of biases, and of norms only if
    decay_norms: bool = False  # ... so told, as dLLM-RL does
    max_grad_norm: float = 1.0
    # An update is skipped where its gradient's norm is above this times the median of the
    # last 64 (from 8 on); 0: only where it is not finite.
    max_grad_skip: float = 0.0

    def __post_init__(self):
        checks.fields(
            self,
            lr=">= 0",
            schedule=tuple(SCHEDULES),
            warmup=">= 0",
            horizon=">= 0",
            final=">= 0, <= 1",
            b1=">= 0, < 1",
            b2=">= 0, < 1",
            eps="> 0",
            weight_decay=">= 0",
            max_grad_norm="> 0",
            max_grad_skip=">= 0",
        )
        if 0 < self.max_grad_skip <= 1:
            raise checks.Refused(
                "max_grad_skip",
                f"={self.max_grad_skip}: times the median of a gradient's norm, above 1, "
                "such as 10; or 0, which is off",
            )


MOST_ANSWERS = 2**24  # of a step: the host holds each


@dataclasses.dataclass(frozen=True)
class RLConfig:
    """One step: prompts x group rollouts, rewards, advantages, updates."""

    steps: int = 80
    prompts: int = 64  # problems of one step
    group: int = 16  # rollouts of one problem
    # Graders, keys of rewards.GRADERS or one's own as module:function; several with
    # weights as in "math:1,length:0.1" (docs/rewards.md).
    reward: str = "math"
    # Value model: "none"; "own" network; "head" on the policy; or "trace", a regression on
    # what the sampler recorded, which costs next to nothing (ridge.py).
    value: str = "own"
    gamma: float = 1.0  # discount per denoising step
    lam: float = 1.0  # GAE lambda per denoising step
    # Weight of an answer's own reward, on the tokens of its last step, where its tokens
    # have rewards, too (reward.split, or a grader's own); 0: theirs alone, as dLLM-RL.
    outcome: float = 1.0
    # Rewards within their group. zscore: GRPO. center: less the mean. loo: less the
    # mean of the others. none: as graded.
    advantage: str = "zscore"
    speed: float = 0.0  # weight of tokens per forward as a second reward; 0: none
    # Groups to learn from. solvable: their solve rate is within the bounds below.
    # varied: their rewards differ. paced: one answer is right and their speeds differ.
    filter: str = "solvable"
    min_solved: float = 0.2  # groups solved less often than this are dropped, and
    max_solved: float = 0.8  # ... those solved more often
    # Prompts that a step may ask, until `prompts` groups pass the filter (DAPO's dynamic
    # sampling); 0: it asks `prompts` and takes what passes.
    max_prompts: int = 0
    # A problem whose answers were all right so many times in a row is passed over the next
    # `rest_for` times that it comes up; 0: never.
    rest_after: int = 0
    rest_for: int = 4
    # How much a problem's last solve rate p decides whether it is asked when it comes up:
    # with chance 1 - curriculum x (1 - 4 p (1 - p)), p as if one more answer had been right
    # and one wrong. 0: not at all.
    curriculum: float = 0.0
    # An answer cut at its limit. wrong: it earns 0, or what the worst of its group does. graded:
    # as its grader says. soft: that, less for its last tokens. mask: it counts for nothing.
    truncated: str = "wrong"
    # soft: the last tokens of sampler.max_new, which cost more and more; 0: a fifth of it.
    truncated_tail: int = 0
    # Advantages to mean 0 and standard deviation 1 over a step's tokens, after GAE.
    whiten: bool = False
    updates: int = 1  # optimizer updates per step; rollouts are dealt out to them
    # Answers of an update, instead: a step has as many updates as its kept answers fill,
    # at least one; 0: `updates` decides.
    answers_per_update: int = 0
    epochs: int = 1  # passes over a step's answers
    # Every so many steps the policy becomes the reference of objective.reference_beta, in
    # the place of the first policy; 0: never.
    reference_reset: int = 0
    # Where an update finds the policy so many nats (its k3 estimate, a token) from the one
    # that sampled, the step's remaining updates are left out; 0: never.
    target_kl: float = 0.0
    # Where a step's mean entropy, nats a token, is below: a warning, and entropy_low=1; 0:
    # never. What collapsed explores no more.
    entropy_floor: float = 0.0
    # own: the first steps, in which the value network learns and the policy stays.
    value_warmup: int = 0
    # own: it also learns from the groups that rl.filter drops, after those that it keeps.
    value_all: bool = False
    # own: a checkpoint that the value network starts from, such as another run's value/
    # (run.export_value); "": the policy's.
    value_path: str = ""
    # own: it sees, beside the tokens, with which log-probs the sampler drew them.
    value_record: bool = False
    # own: its passes over a step's answers, for each of the policy's.
    value_epochs: int = 1
    # What the sampler recorded stands for old log-probs, which saves the policy's
    # scoring, while no token of an update's first microbatch is off by more nats; 0:
    # never. -1: the program chooses (config.chosen).
    trusted_gap: float = -1.0

    def __post_init__(self):
        checks.fields(
            self,
            steps=">= 1",
            prompts=">= 1",
            group=">= 1",
            value=VALUES,
            gamma=">= 0, <= 1",
            lam=">= 0, <= 1",
            outcome=">= 0",
            advantage=(*advantage.BASELINES, "none"),
            speed=">= 0",
            filter=tuple(advantage.FILTERS),
            min_solved=">= 0",
            max_solved="<= 1",
            max_prompts=">= 0",
            rest_after=">= 0",
            rest_for=">= 1",
            curriculum=">= 0, <= 1",
            truncated=TRUNCATED,
            truncated_tail=">= 0",
            updates=">= 1",
            answers_per_update=">= 0",
            epochs=">= 1",
            target_kl=">= 0",
            reference_reset=">= 0",
            entropy_floor=">= 0",
            value_warmup=">= 0",
            value_epochs=">= 1",
            trusted_gap=">= -1",
        )
        try:
            rewards.weights(self.reward)
        except ValueError as error:
            raise checks.Refused("reward", f"={self.reward!r}: {error}") from None
        if self.advantage != "none" and self.group < 2:
            raise ValueError(
                f"rl.group={self.group}: rl.advantage={self.advantage!r} compares at "
                "least 2 rollouts; raise rl.group or set rl.advantage='none'"
            )
        if self.min_solved > self.max_solved:
            raise ValueError(
                f"rl.min_solved={self.min_solved}, rl.max_solved={self.max_solved}: a "
                "range of solve rates, 0 <= min_solved <= max_solved <= 1"
            )
        for name, wrong, why in self.unfit():
            if wrong:
                raise checks.Refused(name, f"={getattr(self, name)!r}: {why}")

    def unfit(self) -> tuple[tuple[str, bool, str], ...]:
        """Returns (name, whether its value goes ill with others', why) of keys."""
        apart = f"needs rl.value='own', a network that learns apart, not {self.value!r}"
        most = self.prompts * self.group
        return (
            (
                "prompts",
                most > MOST_ANSWERS,
                (
                    f"with rl.group={self.group} a step has {most:,} answers; at most "
                    f"{MOST_ANSWERS:,}"
                ),
            ),
            (
                "updates",
                most < self.updates,
                f"a step has at most rl.prompts * rl.group = {most} answers",
            ),
            ("trusted_gap", -1 < self.trusted_gap < 0, "nats, 0 or more; or -1"),
            (
                "trusted_gap",
                self.trusted_gap > 0 and self.value == "head",
                "it is 0 where rl.value='head', whose values are scored with the log-probs",
            ),
            (
                "answers_per_update",
                self.answers_per_update > most,
                f"a step has at most rl.prompts * rl.group = {most} answers",
            ),
            ("value_warmup", self.value_warmup and self.value != "own", apart),
            ("value_epochs", self.value_epochs > 1 and self.value != "own", apart),
            ("value_record", self.value_record and self.value != "own", apart),
            ("value_all", self.value_all and self.value != "own", apart),
            ("value_path", self.value_path and self.value != "own", apart),
            (
                "value_warmup",
                self.value_warmup >= self.steps,
                f"fewer than rl.steps={self.steps}, or the policy never moves",
            ),
            (
                "max_prompts",
                0 < self.max_prompts < self.prompts,
                f"rl.prompts={self.prompts} or more; or 0, which asks for no others",
            ),
            (
                "truncated_tail",
                self.truncated_tail and self.truncated != "soft",
                f"only rl.truncated='soft' has one, not {self.truncated!r}",
            ),
        )

    @property
    def truncated_wrong(self) -> bool:
        """Whether an answer cut at its limit earns nothing."""
        return self.truncated == "wrong"

    @property
    def most_updates(self) -> int:
        """The most optimizer updates of a step."""
        if not self.answers_per_update:
            return self.updates
        return self.prompts * self.group // self.answers_per_update

    @property
    def most_dropped(self) -> int:
        """The most updates of a step's answers that rl.filter drops: see value_all."""
        if not self.value_all:
            return 0
        asked = max(self.max_prompts, self.prompts) * self.group
        return -(-asked // self.largest_update)

    @property
    def largest_update(self) -> int:
        """The most answers of an update."""
        return self.answers_per_update or -(-self.prompts * self.group // self.updates)


@dataclasses.dataclass(frozen=True)
class JudgeConfig:
    """Who judges answers, or chunks of them, and how it is asked (docs/judges.md)."""

    # http://HOST/v1: an endpoint of OpenAI's chat completions. module:function: one's own.
    # Else a checkpoint, sampled by the engine. "": nobody.
    at: str = ""
    model: str = ""  # the endpoint's name for the model
    key: str = ""  # the environment variable with the endpoint's key; "": it needs none
    votes: int = 3  # answers of a model to each question
    temperature: float = 0.6
    tokens: int = 1024  # of an answer, at most
    prompt: int = 4096  # a checkpoint's: tokens of a question; longer are not asked
    rows: int = 16  # a checkpoint's: questions answered together
    seconds: float = 120.0  # an endpoint's: for a question, each time that it is asked
    tries: int = 4  # an endpoint's: how often a question is asked that gets no answer
    parallel: int = 16  # an endpoint's: questions at once
    # An endpoint's: it is shown the images that a question is about. False: it reads texts.
    images: bool = True

    def __post_init__(self):
        checks.fields(
            self,
            votes=">= 1, <= 64",
            temperature=checks.TEMPERATURE,
            tokens=">= 1",
            prompt=">= 1",
            rows=">= 1",
            seconds="> 0, <= 3600",
            tries=">= 1, <= 100",
            parallel=">= 1, <= 1024",
        )
        if "://" in self.at:
            try:
                endpoint.parsed(self.at)
            except ValueError as error:  # which might repeat a password
                raise checks.Refused("at", f": {error}") from None
        elif self.key:
            raise checks.Refused("key", ": only an endpoint, a URL, has a key")
        elif self.at and not self.images:
            raise checks.Refused(
                "images",
                "=False: of an endpoint, a URL; a checkpoint without a vision tower or codes "
                "of images is shown none, and a function looks at them or does not",
            )
        if self.key and not re.fullmatch("[A-Z][A-Z0-9_]*", self.key):
            raise checks.Refused(  # it may be the key itself, which is not to be told
                "key", ": the NAME of an environment variable that holds the key"
            )


@dataclasses.dataclass(frozen=True)
class RewardConfig:
    """How programs are run that rl.reward="code" grades, and how answers are split."""

    # Of a processor, of a test; where a record has none of its own.
    seconds: float = 4.0
    memory_mb: int = 512  # of a program, likewise
    workers: int = 0  # programs at once; 0: one less than there are cores
    all_cases: bool = True  # False: a program's first failure ends its tests
    # Run them also where neither Landlock nor namespaces confine them: they can then do
    # what the user can who trains.
    allow_unsafe: bool = False
    model: str = ""  # rl.reward="reward_model": its checkpoint (configs/rlhf.py:reward)
    # Process rewards: an answer's chunks are judged, beside its outcome. none: they are
    # not. tokens: `chunk` tokens each. steps: what `chunk` denoising steps unmasked.
    # marks: up to a token with `mark` in its text.
    split: str = "none"
    chunk: int = 200
    mark: str = "\n"
    # A chunk's reward is borne by what was unmasked last of all its tokens, or of this
    # many before its end.
    tail: int = 0
    judge: JudgeConfig = dataclasses.field(default_factory=JudgeConfig)

    def __post_init__(self):
        checks.fields(
            self,
            split=("none", *process.SPLITTERS),
            chunk=">= 1",
            tail=">= 0",
            seconds="> 0, <= 3600",
            memory_mb=">= 16, <= 1048576",
            workers=">= 0, <= 1024",
        )
        if not self.mark:
            raise checks.Refused(
                "mark", "='': a text that ends a chunk, such as a comma"
            )
        if self.split == "steps" and self.tail:
            raise checks.Refused(
                "tail", f"={self.tail}: chunks of steps end nowhere; set it to 0"
            )
        if self.split != "none" and not self.judge.at:
            raise checks.Refused(
                "judge.at",
                f"='': reward.split={self.split!r} needs a judge: a URL, a "
                "module:function or a checkpoint's folder",
            )


ALONE = 1024  # slots of a row that fill a CPU's products alone


@dataclasses.dataclass(frozen=True)
class BatchConfig:
    """The fixed shape of a training batch; trajectories are packed into its rows."""

    # Of a microbatch, over all devices; rounded up to a multiple of data x fsdp, which
    # share them. On a CPU wide rows are computed one at a time: see `on`.
    rows: int = 8
    # Slots of a row: clean copies and noised blocks. 0: the program chooses a width that
    # holds the longest trajectory (layout.Layout.width). Where there are more devices than
    # rows, these may become narrower (config.shared_batch).
    tokens: int = 0

    def __post_init__(self):
        checks.fields(self, rows=">= 1", tokens=">= 0")

    def on(self, devices: int, platform: str) -> "BatchConfig":
        """Returns the shape where so many devices share the rows: all have as many.

        What they do not need is padding. Of rows that do not divide, each device would
        compute all. A CPU is as fast with one row of ALONE slots as with several together,
        and the rows that an update's last microbatch lacks cost as much as others.
        """
        alone = platform == "cpu" and self.tokens >= ALONE
        rows = 1 if alone else self.rows
        return dataclasses.replace(self, rows=-(-rows // devices) * devices)
