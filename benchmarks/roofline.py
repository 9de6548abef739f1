"""What a program would do at most on a chip, from what its text counts.

The assumptions, which are those of a run of the published recipe: a block takes 2.2 forwards,
a row has seen 1,000 positions (half of its canvas where that is shorter), an answer has 500
tokens after a prompt of 588, and a query of a packed row visits tiles of 1,835 keys, which is
22 % of a row of 8,192. A program takes the longer of its bytes and its FLOPs at the chip's
peak, and then its collectives, none of them overlapped. The *ideal* of a forward reads the
weights once and the keys of each row once, or multiplies what its windows need, whichever
takes longer; it waits for nobody.

What is inside kernels no text tells: `KERNELS` has it, by their names, from the shapes.
"""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax

from benchmarks import chips
from benchmarks.cost_analysis import Counted
from dllm_jax.models import selfcheck, transformer
from dllm_jax.models.config import ModelConfig
from dllm_jax.pallas_kernels import choice

STEPS = 2.2  # forwards of a block, in which its tokens are unmasked
CONTEXT = 1000
PROMPT, ANSWER = 588, 500  # tokens, on average
FILL = 0.956  # of a packed row's slots that hold something
SUPERVISED = FILL / (1 + STEPS)  # of a packed row's slots: of answers without prompts
VISITED = 1835  # keys of a packed row that a query's tiles, of 256 x 512, hold
# Queries, and keys on a TPU, that share what is read of the others.
TILE, FETCHED = 256, 1024
COMPUTED = 0.8  # of VISITED, in parts of 256 keys on a TPU (docs/kernels.md)


class Facts(NamedTuple):
    """Sizes of a program on one device, by the letters of their arrays."""

    rows: float  # of a microbatch, or windows of a forward that are used
    windows: int  # that a forward computes
    held: float  # rows whose pages are read, for one window or two
    width: int  # T of a packed row, or Q
    seats: int  # positions that the head is asked for
    context: int  # positions that a window's row has in pages
    keys: float  # that a query of a packed row, or of a prompt's chunk, visits
    N: int
    K: int
    H: int
    D: int
    V: int
    E: int  # experts, of which a token goes to X, each of inner width I
    X: int
    I: int
    itemsize: int
    # What of one op is known, and of a whole run assumed:
    kept: float | None = None  # windows that are written; None: those that end a block
    computed: float = COMPUTED  # of `keys`, in parts of 256 on a TPU
    # Rows of a tile and keys (or ids) of it: what one side has, the other is read again for.
    # Of the head 0: all.
    tile: tuple[int, int] = (0, 0)


def facts(model: ModelConfig, model_axis: int, **sizes) -> Facts:
    """Returns the Facts of a model of which `model_axis` devices share the heads."""
    own = selfcheck.part_of(model, model_axis)
    return Facts(
        N=own["heads"],
        K=own["kv_heads"],
        H=model.head_dim,
        D=model.d_model,
        V=own["vocab"],
        E=own["experts"],
        X=model.experts_per_token,
        I=model.sizes["I"],
        itemsize=jax.numpy.dtype(model.dtype).itemsize,
        **sizes,
    )


# ---- Kernels -------------------------------------------------------------------------


def paged(f: Facts) -> Counted:
    """A layer's attention over pages: of windows, or of two of a row together."""
    Q, size, paired = f.width, f.itemsize, f.held < f.rows
    # Of a pair both are computed, though one may be missing; by itself such a one sees nothing.
    computed, windows = (2 * f.held,) * 2 if paired else (f.rows, f.windows)
    keys = f.held * f.context + (f.held if paired else f.windows) * Q
    return Counted(
        flops=4.0 * computed * Q * (f.context + Q) * f.N * f.H,
        read=(keys * 2 * f.K + windows * Q * f.N) * f.H * size,
        written=windows * Q * f.N * f.H * size,
    )


def written_pages(f: Facts) -> Counted:
    """A layer's update of pages: the windows that are kept, in and out."""
    windows = f.rows - f.rows / (1 + 1 / STEPS) if f.kept is None else f.kept
    kept = windows * f.width * 2 * f.K * f.H * f.itemsize
    return Counted(read=kept, written=kept)


def gathered_pages(f: Facts) -> Counted:
    """A layer's pages of the rows of chunks, in and out."""
    pages = f.held * f.context * 2 * f.K * f.H * f.itemsize
    return Counted(read=pages, written=pages)


def walks(size: int, tile: int) -> int:
    """Returns how often one side is read for the tiles of the other; 0: all are one."""
    return -(-size // tile) if tile else 1


def of_head(f: Facts) -> Counted:
    """A kernel that walks over the vocabulary: once for each tile of rows."""
    R, head = f.seats, f.D * f.V
    return Counted(
        flops=2.0 * R * head,
        read=(walks(R, f.tile[0]) * head + R * f.D) * f.itemsize,
        written=4.0 * R * 6,
    )


def of_rows(f: Facts) -> Counted:
    """The gradient of the head's rows: logits again, and what they multiply."""
    R, head = f.seats, f.D * f.V
    return Counted(
        flops=4.0 * R * head,
        read=(walks(R, f.tile[0]) * head + R * f.D) * f.itemsize,
        written=R * f.D * f.itemsize,
    )


def of_columns(f: Facts) -> Counted:
    """The gradient of the head: each tile of the vocabulary reads the rows, both ways round."""
    R, head = f.seats, f.D * f.V
    return Counted(
        flops=4.0 * R * head,
        read=(head + walks(f.V, f.tile[1]) * 2 * R * f.D) * f.itemsize,
        written=head * f.itemsize,
    )


def packed(products: int, in_parts: bool = False):
    """Returns the count of a pass of tiled attention; each tile of queries reads its keys.

    in_parts: of what is visited some is not computed.
    """

    def counted(f: Facts) -> Counted:
        T, head = f.width, f.H * f.itemsize
        streamed = math.ceil(T / TILE) * f.keys * 2 * f.K * head
        computed = f.computed if in_parts else 1.0
        return Counted(
            flops=2.0 * products * f.rows * T * f.keys * computed * f.N * f.H,
            read=f.rows * (T * f.N * head * (products - 1) + streamed),
            written=f.rows * T * f.N * head,
        )

    return counted


def backward(f: Facts) -> Counted:
    """TPU's backward pass of packed attention: each tile of keys reads its queries.

    One call of a few: each is of a share of the queries, and of all keys.
    """
    T, head, kernel = f.width, f.H * f.itemsize, choice.module("attention", "tpu")
    calls = len(kernel.shares(f.N // f.K, f.H, T, kernel.TILE_T))
    streamed = math.ceil(T / FETCHED) * f.keys * 2 * f.N * head
    return Counted(
        flops=2.0 * 5 * f.rows * T * f.keys * f.computed * f.N * f.H / calls,
        read=f.rows * (3 * T * f.K * head + streamed / calls),
        written=f.rows * T * (f.N * head / calls + 2 * 4 * f.K * f.H),
    )


LANES, SUBLANES = 128, 8  # of a TPU's register: jax's splash attention fills them


def splash(residuals: bool):
    """Returns the count of jax's splash attention, forward; residuals: for a gradient.

    Each query head reads its key head's tiles, and for each of its own the mask's numbers,
    once for every lane, as it writes the sums.
    """

    def counted(f: Facts) -> Counted:
        T, head, lanes = f.width, f.H * f.itemsize, 4 * LANES
        streamed = walks(T, f.tile[0]) * f.keys * 2 * head
        return Counted(
            flops=4.0 * f.rows * T * f.keys * f.N * f.H,
            read=f.rows * f.N * (T * (head + lanes) + streamed),
            written=f.rows * f.N * T * (head + lanes * residuals),
        )

    return counted


def splash_backward(f: Facts) -> Counted:
    """Its fused backward pass; each tile of keys writes what it adds to all queries' gradient."""
    T, head, tiles = f.width, f.H * f.itemsize, walks(f.width, f.tile[1])
    streamed = tiles * f.keys * (2 * head + 3 * 4 * SUBLANES)
    return Counted(
        flops=10.0 * f.rows * T * f.keys * f.N * f.H,
        read=f.rows * (2 * T * f.K * head + f.N * streamed),
        written=f.rows * (2 * T * f.K * head + tiles * T * f.N * head),
    )


def ragged_pages(f: Facts) -> Counted:
    """jax's ragged_paged_attention: a tile's queries are multiplied for each of its rows.

    context: positions that a row's pages hold, its window's among them; keys: those that
    its blocks of pages compute.
    """
    queries = f.rows * f.width * f.N * f.H * f.itemsize
    return Counted(
        flops=4.0 * f.rows * f.tile[0] * f.keys * f.N * f.H,
        read=queries + f.rows * f.context * 2 * f.K * f.H * f.itemsize,
        written=queries,
    )


def experts(f: Facts, *, empty: bool = False) -> Counted:
    """Rows that chose one of all experts, by its matrix; empty: it reads others', too."""
    choices = f.windows * f.width * f.X
    matrices = f.E if empty else min(f.E, choices)
    return Counted(
        flops=2.0 * choices * f.D * f.I,
        read=(matrices * f.D * f.I + choices * f.D) * f.itemsize,
        written=choices * f.I * f.itemsize,
    )


# Name in the program's text (TPU's, then GPU's): Facts -> Counted of one call.
KERNELS = {
    "paged_attention": paged,
    "cache_update": written_pages,
    "gathered": gathered_pages,
    **dict.fromkeys(("draw_kernel", "token_draw"), of_head),
    **dict.fromkeys(("pick_kernel", "behind_kernel", "token_logprob"), of_head),
    "dx_kernel": of_rows,
    "dhead_kernel": of_columns,
    "forward_kernel": packed(2, in_parts=True),
    "backward_kernel": backward,
    "attention": packed(2),
    "attention_dq": packed(3),
    "attention_dkv": packed(4),
    "grouped_matmul": experts,
    # No program of a run has these: counted.py sets them beside ours.
    "body": functools.partial(experts, empty=True),  # of jax's own ragged_dot_mgpu
    "splash_mqa_fwd_no_residuals": splash(residuals=False),
    "splash_mqa_fwd_residuals": splash(residuals=True),
    "splash_mqa_dkv_no_residuals": splash_backward,
    "ragged_paged_attention_kernel": ragged_pages,
}


def with_kernels(counted: Counted, sizes: Facts) -> Counted:
    """Returns the figures with those of the kernels added.

    Raises ValueError for a kernel that KERNELS does not know.
    """
    total = Counted()
    total.add(counted)
    for name, times in counted.kernels.items():
        if name not in KERNELS:
            raise ValueError(f"roofline.KERNELS has no {name!r}: say what it does")
        total.add(KERNELS[name](sizes), times)
    return total


# ---- Times ---------------------------------------------------------------------------


def seconds(counted: Counted, topology: str) -> float:
    """Returns the least seconds that a program can take."""
    chip = chips.chip(topology)
    busy = max(
        counted.flops / chip.flops, (counted.read + counted.written) / chip.bandwidth
    )
    return busy + sum(counted.sent.values()) / chips.link_bytes(topology)


class Sizes(NamedTuple):
    """Multiplications of a model: parameters that a token meets."""

    layers: float  # of all layers, of experts those that are chosen
    stored: float  # the same with all experts
    head: float


def sizes_of(model: ModelConfig) -> Sizes:
    """Returns the Sizes of a model."""
    plain = dataclasses.replace(model, lora=None)
    tree, size = transformer.specs(plain), model.sizes
    chosen = stored = 0.0
    for spec in jax.tree.leaves([tree.get("first", {}), tree["layers"]]):
        count = math.prod(transformer.shape(spec, model))
        stored += count
        of_experts = len(spec.dims) > 1 and spec.dims[1] == "E" and size["E"]
        chosen += count * model.experts_per_token / size["E"] if of_experts else count
    return Sizes(chosen, stored, size["D"] * size["V"])


def ideal_forward(
    model: ModelConfig, rows: float, sizes: Facts, share: int, layer_size: int
) -> Counted:
    """Returns what a forward of blocks must do on one device.

    rows: of the devices that share the weights; share: how many these are. layer_size:
    bytes of a weight of a layer.
    """
    weights, Q = sizes_of(model), sizes.width
    itemsize, keys = sizes.itemsize, 2 * sizes.K * sizes.H * model.layers
    windows = rows * (1 + 1 / STEPS)
    attention = 4.0 * windows * Q * sizes.context * sizes.N * sizes.H * model.layers
    return Counted(
        flops=2.0 * Q * (weights.layers * windows + weights.head * rows) / share
        + attention,
        read=(weights.stored * layer_size + weights.head * itemsize) / share
        + rows * sizes.context * keys * itemsize,
    )


def useful_update(
    model: ModelConfig, answers: int, prompt: float, answer: float, nets: int
):
    """Returns the FLOPs that an update's answers ask for, on all devices.

    Six a parameter and a slot that holds something, and of the head six a parameter and a
    supervised token. nets: networks that are trained; the value network has no head.
    """
    weights = sizes_of(model)
    slots = prompt + (1 + STEPS) * answer
    return 6.0 * answers * (nets * weights.layers * slots + weights.head * answer)
