"""Reinforcement learning for diffusion language models, in JAX.

The alphabet. An array's name ends in the letters of its axes, `logp_BT`; a scalar and a
Python int have none. A capital means one thing in the whole package, and the same in
einsums, in parameters' `Spec("DNH")` and in the rules of `sharding.py`:

    B  rows: of a batch, of the sampler's slots, of a trace on the host
    T  positions of a canvas, or slots of a packed row
    S  positions of keys
    W  positions of a window
    L  layers
    Y  the dense layers before them
    D  model width
    F  feed-forward width
    V  vocabulary
    N  query heads, or codes of an image
    K  heads of keys and values
    G  query heads that share a key head, N / K
    H  head dimension
    E  experts
    X  experts of a token
    I  an expert's inner width
    Z  inner width of the experts that all tokens share
    J  blocks
    Q  positions of a block
    P  pages of the pool
    O  slots of a page
    A  pages of a row
    R  rows and positions, flattened
    U  supervised seats of a packed row
    C  rank of an adapter, or channels of an image
    M  soft tokens: rows of the table of images' parts
    n  items on the host: prompts, trajectories
    m  microbatches
    h  pairs of rotary dimensions, or rows of pixels

A digit is that size: `words_B2`. Any other small letter is a file's own, and a line of
that file's docstring says so, as in

    Letters: d shards, w windows.

The floors. A room imports from its own and from lower floors; an entry also imports
`config`, which assembles the configurations that the floors below declare, what goes with
it (`compatible`, `pictures`), `command_line`, which reads it, and `begin`:

    6  config, compatible, pictures, command_line, begin, and the entries: train, eval,
       generate, convert, trace, report, harness
    5  rl
    4  sampling
    3  models
    2  pallas_kernels, viewer
    1  sharding, compiler, data, metrics, trackers, curves, memory, checkpoint, folder
    0  checks, limits, records, processes, statistics, images; below them exits

`configs/` and `benchmarks/` stand outside; nothing in here imports them, or PyTorch.

The reading order, for who wants to know how a prompt becomes a gradient:

    sampling/state.py            what sampling leaves: tokens, and the step of each
    sampling/denoise.py          the one sampler: look, unmask, move
    sampling/strategy.py         which masked positions a step unmasks
    sampling/schedules.py        how many positions each step unmasks
    sampling/policy.py           what is computed again, and what a cache keeps
    models/mask.py               who sees whom, as ranges
    models/transformer.py        the one tower, its parameters declared once
    models/layer.py              a layer of it
    pallas_kernels/reference.py  what every op computes, in plain jnp
    rl/noise.py                  which tokens are masked together, and how they weigh
    rl/selection.py              the likelihood of a step, with what it threw away
    rl/layout.py                 how a masked trajectory is shown to the model
    rl/views.py                  the same as packed rows of one fixed shape
    rl/advantage.py              what rewards say of tokens
    rl/objectives.py             the losses of tokens
    rl/learner.py                the one update, its gradient and its state
    rl/batches.py                from graded answers to what an update takes
    rl/step.py                   what every source of a step's batches is given, and gives
    rl/sources.py                where RL's come from: asked, graded, kept, dealt out
    rl/examples.py               where those of SFT, DPO and reward models come from
    begin.py                     what a run has before its first step, stage by stage
    train.py                     its steps

and for who wants to know how it is fast, or what surrounds it:

    sampling/pages.py            pages of keys that rows share
    sampling/rows.py             the engine on the device: rows, and what the host changes
    sampling/forwards.py         a forward of them, of prompts or of blocks, and the loop
    sampling/canvases.py         the same where keys are not final: of canvases or of blocks
    sampling/shards.py           what both share: windows of rows, dealt out by shard
    sampling/scheduler.py        the engine on the host: who gets a row and which pages
    sampling/engine.py           the engine between them: turns, answers as they end
    models/acting.py             the weights that sample, and where they lie
    models/int8.py               the same, rounded to half the bytes
    sampling/placement.py        which devices share them
    sampling/answers.py          the front door of sampling: prompts in, answers out
    pallas_kernels/choice.py     which kernel is taken where
    models/families.py           what a published model's fields and names mean here
    models/repository.py         a Hugging Face folder's files, and their tensors by name
    models/hf.py                 weights out of such a folder, and into one
    models/export.py             what else an export has
    models/vision/magvit.py      images to codes, and back
    models/vision/soft.py        what a model reads of an image: rows of a table
    models/vision/siglip.py      the tower that makes features of it
    models/vision/look.py        a step's images, each seen once
    sampling/looking.py          an answerer of prompts with images, before another
    images.py                    image files to pixels, with bounded memory
    models/selfcheck.py          kernels against their specification, before a run
    models/first_run.py          ... of which one hangs, or breaks the device
    rl/rollout.py                answers decoded, graded and written
    rl/beside.py                 graded while others are sampled
    rl/rewards/__init__.py       what judges answers, by name and weight
    rl/rewards/process.py        answers in chunks, and what verdicts on these are worth
    rl/rewards/judge.py          what a judge is asked, and how it votes
    rl/rewards/own.py            functions that a user gave
    rl/rewards/endpoint.py       a judge behind HTTP, whatever may go wrong there
    rl/rewards/lent.py           a judge that is a checkpoint
    rl/rewards/ranking.py        scores of a reward model
    rl/rewards/sandbox.py        programs that nobody has read, run
    rl/rewards/jail.py           what confines them
    rl/rewards/trial.py          a judge who asks a candidate, each in a jail
    rl/rewards/code.py           from records of many formats to a share of tests
    rl/rewards/strengthen.py     more tests, of what a record's solution says
    rl/rewards/nearby.py         ... of inputs near those of its own tests
    statistics.py                intervals, pass@k, maj@k, AUP
    rl/scores.py                 what an evaluation found, with its intervals
    data/prompts.py              from records to problems: texts and conversations to ids
    data/conversations.py        from records to answers that are learned
    data/stream.py               which items come next
    data/tokens.py               tokenizers, and the ids that end an answer
    data/plain.py                ... that are one file, read at once
    data/sets.py                 published sets of problems, by checksum
    data/templates.py            prompts as dLLM-RL writes them
    rl/rewards/units.py          quantities with units, for mathematics
    rl/rewards/puzzles.py        puzzles judged by their rules
    rl/rewards/ocr.py            drawings judged by the words that can be read in them
    rl/ridge.py                  a critic that reads what the sampler recorded
    rl/curriculum.py             which problems are asked next
    rl/best.py                   the best evaluation, which stays
    rl/networks.py               the states that a run trains, from a folder
    rl/guard.py                  which updates are skipped, and when a run has diverged
    rl/budget.py                 what a run takes of memory, before it starts
    sharding.py                  the two tables that split everything over a mesh
    compiler.py                  how XLA is set up
    processes.py                 many processes: joined, alike, ended together
    checkpoint.py                saved states, and exact resumption
    folder.py                    a run's folder: its lock, its log, its attempts
    config.py                    every key in one tree
    compatible.py                which keys of several groups go together
    pictures.py                  how a run reads images, and draws them
    viewer/page.py               pages that people look at: one file with all inside
    command_line.py              that tree from a file and its overrides; how entries end
"""

import gc
import os
import signal
import sys


def stop_importing(number, frame):
    """Ends a command that Ctrl-C reaches while it imports, as `entry` would: in a line."""
    os.write(2, b"stopped by a signal\n")
    os._exit(75)  # exits.STOPPED


if sys.argv[:1] == ["-m"]:  # a command, until command_line.entry begins
    gc.disable()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, stop_importing)
