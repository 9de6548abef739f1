"""The page docs/scaling.md, made of benchmarks/budget.json and docs/benchmarks.jsonl."""

import json
import pathlib

from benchmarks import chips

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "scaling.md"
MEASURED = PAGE.with_name("benchmarks.jsonl")
HEAD = """# Scaling: what the compiled programs could do

Made by `make budget ARGS=--write`; `benchmarks/budget.json` holds the same figures and more.
**Nothing here was measured on a chip**, but for one table that says so. Each program was compiled
as `python -m dllm_jax.train` with the preset's settings would compile it, its text counted, and
set against what the chip can do at most (`benchmarks/chips.py`). So the rates are bounds:
launches, stalls and what collectives could hide are left out, and so is what a chip does not
reach of its peak.

Assumed are the published recipe's lengths (`benchmarks/roofline.py`): 2.2 forwards a block,
1,000 positions seen, 500 tokens an answer. Kernels are those that `auto` takes where the
self-check has found every one right. *Ideal* is a forward that reads weights and keys once, or
multiplies no more than it must, and waits for nobody.

Of the engine's programs those are left out that no figure counts: for fewer windows, for fewer
parts of prompts, and over narrower tables (`programs.widest`; `--whole` compiles all of them). A
forward of blocks is the same to the last digit here, of 8B with 64 rows on one H200, and the
whole program holds 0.04 GiB more than is told, and took twice as long to compile. Layers are one
loop of the text, so that figures of fewer layers would come no sooner.

A run compiles all of them, and then finds them on disk. Cold, on two cores of one machine, seconds
from a model's shapes to SDAR-8B's program; before is a77af13 (in brackets with its kernels, which
`auto` did not take on a GPU):

| program | chips | before | now |
| --- | --- | --- | --- |
| engine | h200:8 | 42 (57) | 50 |
| engine | v5p:4x4x4 | 44 | 38 |
| update | h200:8 | 36 (42) | 47 |
| update | v5p:4x4x4 | 75 | 79 |
"""


def text(cells: dict, every: list[str]) -> str:
    """Returns the page; cells: what budget.json holds, by name; every: all names."""
    tables = rollouts, measured, updates, refusals, faults
    end = LOSSES.format(**figures(cells))
    return HEAD + "".join(of(cells) for of in tables) + missing(cells, every) + end


def write(cells: dict, every: list[str]):
    """Writes the page of `text`."""
    PAGE.write_text(text(cells, every))


def table(head: str, rows: list[list]) -> str:
    """Returns a table; head: the names of its columns, with bars between."""
    lines = [head, " | ".join(["---"] * len(head.split(" | ")))]
    lines += [" | ".join(str(x) for x in row) for row in rows]
    return "".join(f"| {line} |\n" for line in lines)


def fitting(cells: dict, *programs: str):
    """Yields (model, topology, figures) of the cells of programs that fit."""
    for name, row in cells.items():
        model, topology, program, *more = name.split()
        model += " int8" if "int8" in more else ""
        if program in programs and not row["refused"]:
            yield model, topology, row


def short(x: float) -> str:
    """Returns a figure with three digits, or all before the point."""
    return f"{x:,.0f}" if x >= 100 else f"{x:.3g}"


def sent(row: dict) -> str:
    """Returns the MiB of collectives by axis, those of a MiB and more."""
    large = {axis: size for axis, size in row["sent_mib"].items() if size >= 1}
    return ", ".join(f"{axis} {size:,.0f}" for axis, size in large.items()) or "none"


def fewer_pages(row: dict) -> str:
    """Returns the share of the pages that rows could fill, where not all fit."""
    share = row.get("percent_of_pages")
    return f" ({share:.0f} % of pages)" if share else ""


def rollouts(cells: dict) -> str:
    """Returns the table of forwards."""
    rows = [
        [
            model,
            topology,
            f"{row['rows_per_device']:g}",
            row["weights_shared_by"],
            f"{row['gib']}{fewer_pages(row)}",
            f"{short(row['read_gib'])} / {short(row['written_gib'])}",
            short(row["tflops"]),
            sent(row),
            f"{row['tokens_per_second']:,.0f}",
            f"{row['percent_of_ideal']:.0f}",
            f"{row['prompt']['tokens_per_second']:,.0f}" if "prompt" in row else "",
        ]
        for model, topology, row in fitting(cells, "rollout", "answers")
    ]
    head = (
        "model | chips | rows a device | share weights | GiB a device | GiB read / written "
        "| TFLOP | MiB sent | tokens/s a device | % of ideal | prompt tokens/s a device"
    )
    return (
        "\n## Rollout: a forward of blocks\n\nOn `h200:1` with 1, 64 and 128 rows: as "
        "`eval` and `generate` run, with nothing trained beside it. int8:\n"
        "with `sampler.int8=True`, whose ideal reads a byte of a layer's weight. Where not all "
        "pages fit that rows could fill, their share\nis told: rows get theirs as they go. "
        "A TPU's compiler keeps arrays of `tiny` on the chip, where nothing is read from its "
        "memory:\non a v6e nearly all, so that it is beyond an ideal that reads them.\n\n"
        + table(head, rows)
    )


def steady(cells: dict):
    """Yields (a line of `decode --steady` on a chip, its topology, the bound it has).

    Lines of programs that no cell is of, or that had no kernels, are left out.
    """
    alone = {kind: f"{x}:1" for x, chip in chips.CHIPS.items() for kind in chip.kinds}
    for line in map(json.loads, MEASURED.read_text().splitlines()):
        where = alone.get(line["device"])
        plain = line["command"].startswith("python -m benchmarks.decode ")
        if not (where and plain and "--steady" in line["command"]):
            continue
        cell = cells.get(f"{line['model']} {where} answers rows={line['rows']}")
        like = line["sampler"].startswith("block 4,") and line["kernels"] != "reference"
        if cell and like:
            yield line, where, cell["tokens_per_second"]


def percent(line: dict, most: float) -> str:
    """Returns which share of a bound a line of `decode` reaches."""
    return f"{100 * line['engine_tokens_per_second'] / most:.0f}"


def figures(cells: dict) -> dict:
    """Returns what LOSSES tells of the tables, by the names that it has there."""
    shares = sorted((percent(line, most) for line, _, most in steady(cells)), key=int)
    small, large = (f"sdar-{x} update" for x in ("1.7b v6e:2x4", "8b v5p:2x2x1"))
    of_small, of_large = cells[small], cells[large]
    v6e = chips.chip(small.split()[1])
    moved = (of_small["read_gib"] + of_small["written_gib"]) * chips.GIB
    sent, summed = sum(of_small["sent_mib"].values()), of_large["sent_mib"]
    links = [chips.link_bytes(name.split()[1]) / 2**20 for name in (small, large)]
    return {
        "least": shares[0],
        "most": shares[-1],
        "memory": f"{moved / v6e.bandwidth:.1f}",
        "products": f"{of_small['tflops'] * 1e12 / v6e.flops:.1f}",
        "collectives": f"{sent / links[0]:.1f}",
        "all_reduce": f"{summed['fsdp all-reduce'] / links[1]:.1f}",
        "seconds": f"{of_large['seconds']:.0f}",
    }


def measured(cells: dict) -> str:
    """Returns the table of what chips made of forwards of blocks: `decode --steady`."""
    rows = []
    for line, where, most in steady(cells):
        row = [line["model"], where, line["rows"], line["busy_rows"], line["context"]]
        row += [f"{most:,.0f}", f"{line['engine_tokens_per_second']:,.0f}"]
        rows.append([*row, percent(line, most), line.get("commit", "")])
    head = (
        "model | chip | rows | busy | context | bound | measured tokens/s | % | commit"
    )
    return (
        "\n## What a chip made of it\n\n`benchmarks.decode --steady`: no prompt in it, random "
        "weights at the forced rate of 2.2 forwards a block. The bound has all rows busy; of "
        "the run so many were, on average, as rows that have ended wait for the last.\n\n"
        + table(head, rows)
    )


def updates(cells: dict) -> str:
    """Returns the table of updates."""
    rows = [
        [
            model,
            topology,
            row["rows_per_device"],
            row["microbatches"],
            row["remat"],
            row["gib"],
            short(row["read_gib"] + row["written_gib"]),
            short(row["tflops"]),
            sent(row),
            short(row["seconds"]),
            f"{row['mfu_bound']:.0f}",
            f"{row['mfu_with_waits']:.0f}",
        ]
        for model, topology, row in fitting(cells, "update")
    ]
    head = (
        "model | chips | rows a device | microbatches | remat | GiB a device | GiB moved | "
        "TFLOP | MiB sent | seconds | MFU bound, % | with collectives, %"
    )
    return (
        "\n## Update of 256 answers\n\nThe MFU bound is the useful FLOPs (six a parameter and "
        "filled slot) over those of the program; `remat` is what the run chooses by its memory "
        "plan; the last column also waits for every collective, none of them overlapped.\n\n"
        + table(head, rows)
        + "\nOf answers of 32,000 tokens 8B's takes 76.5 GiB of an H200 on h200:8, in rows of\n"
        "`batch.tokens=49152` (tests/aot/long_test.py), with `attention`; 48.0 of a v5p on\n"
        "v5p:4x4x4, in rows of 54,144, which the run chooses for 64 devices. A row that holds\n"
        "all rounds of such an answer, which is what `batch.tokens=0` chooses for 8, has 96,896\n"
        "slots, and the update takes 113 GiB.\n"
    )


def refusals(cells: dict) -> str:
    """Returns the table of what does not fit."""
    rows = [
        [name, row["refused"], row["smallest"] or "none that was looked at"]
        for name, row in cells.items()
        if row["refused"]
    ]
    return "\n## What does not fit\n\n" + table("cell | why | fits on", rows)


def missing(cells: dict, every: list[str]) -> str:
    """Returns which cells nobody has compiled yet; `make budget ARGS=--missing` does."""
    names = [name for name in every if name not in cells]
    if not names:
        return ""
    return f"\n## Not compiled yet\n\n{'; '.join(names)}.\n"


def faults(cells: dict) -> str:
    """Returns the list of what programs must not do, and do."""
    lines = [
        f"* {name}: {fault}\n"
        for name, row in cells.items()
        for fault in row.get("faults", [])
    ]
    return "\n## Faults\n\n" + "".join(lines) if lines else ""


LOSSES = """
## What was found and mended

* Programs of prompts and of blocks were a choice within a choice, and XLA copied every page of
  keys at its end on a GPU: SDAR-8B with 64 rows on one H200 moved 143 GiB a forward beside its
  pages and held 64.2 GiB. As one choice: 45 GiB, and 40.2 held.
* On a GPU each layer's weights were copied out of their stack, and some joined, before they
  were multiplied: three times over the memory's bus. Two options of the compiler, for this
  program alone (`denoise.ON_GPU`), let cuBLAS read them where they lie: 18 GiB, of
  which 15.3 are the weights, and from 44 to 81 % of the ideal. Layers as arrays of their own
  do the same and take six times as long to compile.
* A row that has filled a block has two windows in the next forward, the full block and the
  one after it, and each read the row's pages: 1.45 times what the ideal reads. Both are now one
  row of the kernel: 4B with 64 rows on one H200 went from 67 to 80 % of the ideal, with 128 rows
  from 69 to 85 %; 8B with 64 rows from 81 to 93 %; 4B on v5p from 78 to 89 %.
* A part of a prompt was compiled for tables of pages as long as the longest answer, which no
  prompt fills. It now stops where prompts do: of the recipe's lengths there are 12 programs of
  such parts and not 16, and the longest prompt's gathers 800 positions and not 1,024. Parts
  were of 52 positions, a sixteenth of the longest prompt; of 64 a TPU reads the pages less often:
  1.7B's prompts went from 123,100 to 141,600 tokens/s on v5p, from 151,400 to 179,500 on v6e,
  where 4B's went from 53,940 to 59,360. An H200's bounds stayed.
* A cube of v5p was described to its compiler without the links that close its axes to rings,
  and each gather of an update over all 64 chips became an all-reduce, of twice the bytes. With
  them 8B's update sent 235,500 MiB and not 350,400.
* Rows of 8,192 slots are for 8 devices. On 64, of which each has a row, an update's 72 made two
  microbatches, and the second held 8: an MFU bound of 38 % for 8B, 34 % for 4B and 1.7B. Where
  more devices than `batch.rows` share them, rows are now of 5/3 of the longest prompt and answer,
  here 4,608 slots: 128 rows, and the bounds became 67 % for 8B, 61 for 4B, 60 for 1.7B. That two
  microbatches just hold them is this update's luck: with 64 to 256 answers, of lengths that are
  drawn, 74 % of the slots of 64 devices hold something, and 59 % did; of 128 devices 58 and 33 %
  (`python -m benchmarks.fill`, by the run's own packer). `batch.rows=64` brings wide rows back.
* Two backward kernels of attention on a TPU computed the scores twice, and tiles of 512 keys of
  which little is seen. One kernel with five products in place of seven, which skips parts of 256 keys
  (kernels.md), made the bounds of updates on v5p 70 % for 8B, 65 for 4B and 64 for 1.7B, while
  layers were still computed twice.
* XLA's kernel for `jax.lax.ragged_dot` takes an array of its own, and so each layer's experts,
  54 of SDAR-30B-A3B's 57 GiB, were copied out of their stack in every forward on a TPU. Now it
  multiplies by the groups of all layers, of which those of one hold rows
  (`pallas_kernels/tpu/grouped_matmul.py`): 57 GiB read and not 111, none copied, 99 % of the
  ideal and not 34; prompts 19,350 tokens/s and not 7,472. Before it multiplies, the kernel's
  table of groups is made by loops over all 6,144 of them on the chip's scalar unit. What
  that takes no text tells, and nobody has measured it. On a GPU JAX's kernel had them
  copied, too, and one of ours reads them where they lie: on `h200:2x8`, the smallest slice that
  holds that model, a forward reads 31.9 GiB and not 58.9, writes 1.2 and not 28.2, and is at 87 %
  of the ideal and not 34; prompts 28,530 tokens/s a device and not 12,270. Its update takes 6.4 GiB
  less. (That slice is in no cell of the file.)
* The programs of this page have one width of pages' tables, and hid what XLA makes of several on a
  TPU: its gather of prompts' pages had all pages of all layers copied in each layer, wherever a
  device has fewer than 8 key heads. SDAR-4B's default rollout on v6e:2x4 took 37.5 GiB of 31.2
  so, and takes 29.0 since a kernel gathers them (kernels.md); with one key head a device all pages
  were copied at the ends of each program, too. `make aot` compiles such programs with all widths.
* On a GPU gate and up are one matrix of the acting weights, its columns by turns: a layer has a
  product less, and one reading of its input. Bytes stay the same to three digits.
* A program of the engine for one window of one row did not need all that the others do, and
  for that XLA copied every page at its end and at the loop's, 0.8 GiB a forward: 90 % of the ideal
  with one row on one GPU where it is 99. It needs the same now, and the build compiles that cell.
* The presets computed every layer's products twice (`remat="full"`) on devices with half of
  their memory free. Now a run takes the first that fits (`model.remat="auto"`), and there is one
  that computes no product again (`dots`, kernels.md): 8B's update on h200:8 takes 6,981 TFLOP and
  not 8,654, on v5p:4x4x4 843 and not 1,048, for 22 and 11 GiB more.
* 256 rows of SDAR-1.7B can fill more pages than one H200 has beside its update, and the preset
  was refused there. Where not all fit there are fewer: rows get them as they go.
* The embedding was gathered for every microbatch, and its gradient, [V, D] of f32, summed over
  all devices. Now each looks up its columns for the tokens of all, and sends each device the
  columns of its own tokens; so goes the gradient (`models/embedding.py`). 8B's update on h200:8
  sends 638,400 MiB and not 692,500, for 2.6 GiB less; 1.7B's 133,200 and not 160,300, and on
  v6e:2x4 139,200 and not 176,700. The gradient's scatter adds as many
  numbers as before, of more tokens and of fewer columns; what a chip takes for 64 columns of the
  tokens of 64 devices no text tells. Scores, which have no gradient, still gather the table.
* Seats that no token fills were multiplied with the head: from 1,024 seats of a device on there
  is a second program for 5/8 of them (kernels.md).

## What is not reached, and why

Wanted were 75 % of the ideal for 4B and 8B with 64 rows and more, 90 % with one row on one
GPU, and an update's MFU bound of 60 %. The tables say where that is met.

* An H200 reaches {least} to {most} % of the bounds of one GPU (the table above). By a profile of 4B's
  128 rows at b45c99e, of contexts of 800, a forward is busy for 15.0 ms: 8.0 are products, at 700
  TFLOP/s where the bound has 989; 4.4 attention, 0.9 the draw, of whose work noise is more than
  half, 1.9 norms, rotations and the like, which the bound has as bytes alone. Attention over
  pages moves 3.8 TB/s since (128 rows of 992 positions; 3.5 before its blocks went from row to
  row), where a copy moves 4.3. Between kernels the chip waited 0.6 ms of that forward, and 0.6
  of the 5.4 ms that one row of 8B took; with all layers as one graph that row takes 5.0.
* The bundled model does next to nothing in a forward, and what a TPU does around its small
  arrays outweighs it; its heads of 32 are for no kernel, and its float32 is for none of a GPU's.
  A v6e keeps its weights and the pages of its keys on the chip from one forward to the next,
  where the ideal reads them from memory: hence more than all of it.
* The gathers of the update are counted as not overlapped at all. On GPUs the compiled text has
  them asynchronous; on TPUs it does not, and of the flags that are said to change it
  (`xla_enable_async_all_gather`, `xla_tpu_enable_async_collective_fusion` with
  `..._multiple_steps`, `xla_tpu_overlap_compute_collective_tc`,
  `xla_tpu_enable_latency_hiding_scheduler`, the offload of all-gathers to sparse cores) none
  changes a sharded step's text on v5p, and `..._fuse_all_gather` is refused there. So `launch/`
  sets none.
* The recipe's 256 rows of the sampler are for a few devices: on 64 each has 4. Raise
  `sampler.rows` and `rl.prompts` with the slice.
* Over all 64 chips of a v5p cube gradients are summed on every one, which then keeps its
  part. In a small program, of a product of 4,096 x 12,288, the compiler does so with `fsdp`
  of 64, and even with an explicit `psum_scatter` over 64; over 16 chips and then over 4 it
  scatters. The update of 8B with `mesh.data=4` sent as much all the same, before layers
  kept products and tables were looked up by columns: 102,700 MiB of gathers and 127,700 of sums
  over all chips (rows of 4,864 slots), for 22.2 GiB of a device instead of 10.6. To scatter in two steps the gradient of each weight would have to be
  summed by hand inside a `shard_map`, which would save a quarter of what is sent: 19 % of the
  time waits for it, if nothing hides it.
* A TPU's attention takes 1,024 keys a tile, and the 800 of the longest prompt's pages are filled
  up to that by a pass over them of its own: 1.2 GiB more of a forward of prompts than with tiles
  of 512. On v5p 8B's and 4B's take no longer for it, as parts of keys that nobody sees are
  skipped; 1.7B's bound, with parts of 52 positions, was 123,100 prompt tokens/s after it and
  137,900 before. To gather 1,024 positions instead gave 1.7B 135,500 there, but takes 4 % of
  v6e's, where the filling up is no pass of its own, and 1 % of an H200's. Prompts whose pages
  hold 512 positions or fewer are not filled up.
* The head's gradient is a sum over all devices (`psum`) inside a `shard_map`, the one all-reduce
  of 8B's and 1.7B's updates on v5p:2x2x1: {all_reduce} of {seconds} seconds for 8B. A `psum_scatter` sent as many bytes.
* On v5p:2x2x1 the compiler scatters the gradients of all of 8B's and 1.7B's weights, and of 4B
  not those of `wo` and `w_down`: it sums them in one all-reduce with those of norms, which sends
  64 GiB of that update's 323 where 32 would do. Their last dimension is the one that is split,
  into 4 times 640; on v6e:2x4, into 8 times 320, they are scattered. Nobody has found why.
* Where more devices share rows than a microbatch has, `batch.rows` is rounded up to a row for
  each, with a line at start. There is no sequence parallelism: a row lies whole on its device,
  and `mesh.model` splits heads and widths of it.
* A v6e multiplies twice as fast as a v5p and its memory gives 0.6 times as much: the update of
  1.7B there, which keeps its products (`dots`), waits {memory} s for memory where they take
  {products}, and {collectives} s for collectives.
* A value network of its own (`rl.value="own"`, the recipe's) doubles the update and what is
  trained: with it 4B does not fit one H200.
"""
