"""What a checkpoint is: the fields in which language towers differ.

A family is a value of these fields plus a row of `families.py`, never a class.
"""

import dataclasses

from dllm_jax import checks
from dllm_jax.models.vision.config import VisionConfig


@dataclasses.dataclass(frozen=True)
class Lora:
    """Adapters in the place of training the weights themselves: see lora.py."""

    rank: int
    alpha: float
    targets: tuple[str, ...] = ()  # a layer's weights (transformer.stack); (): all w*

    def __post_init__(self):
        if self.rank < 0:
            raise ValueError(f"model.lora_rank={self.rank}: 0 (off) or more")

    @property
    def scale(self) -> float:
        """The factor of A B."""
        return self.alpha / self.rank


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder-only language tower. Hashable, so that it can be a static argument.

    The defaults are SDAR-4B's sizes.
    """

    family: str = "sdar"  # a key of families.FAMILIES: names and fields of checkpoints
    vocab: int = 151936
    d_model: int = 2560
    layers: int = 36
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    ffw: int = 9728
    norm_eps: float = 1e-6
    rope_theta: float = 1e6
    rope_llama3: tuple[float, ...] = ()  # layer.frequencies; (): plain ones
    qkv_bias: bool = False
    qk_norm: bool = True
    tied: bool = False  # the head is the embedding
    # Who sees whom in a clean canvas: block, full, causal (mask.clean).
    attention: str = "block"
    shift: int = 0  # the hidden state at position i - shift answers for position i
    positions: int = 0  # that training has shown it, prompt and answer; 0: not told
    rotary: float = 1.0  # the share of a head's dimensions, the first ones, that rotate
    rope_f32: bool = False  # they rotate in f32, whatever is computed in
    experts: int = 0  # of a layer; 0: one dense feed-forward
    experts_per_token: int = 0
    expert_ffw: int = 0  # an expert's inner width
    shared_experts: int = 0  # that every token visits: one feed-forward, as wide as all
    dense_layers: int = 0  # layers without experts, which come first
    sparse_step: int = 1  # layer i has experts only where (i + 1) % sparse_step is 0
    router: str = "softmax"  # scores of the experts: softmax, sigmoid (moe.route)
    router_bias: bool = False  # added to the scores for the choice alone
    router_norm: bool = True  # a token's weights sum to one, before the scale
    router_scale: float = 1.0
    router_groups: int = 1  # of experts; only the best `router_best_groups` are open
    router_best_groups: int = 1
    block: int = 4  # positions denoised together, on the absolute grid pos // block
    codebook: int = 0  # codes of images, behind the tokenizer's last token; 0: none
    mask_id: int = 151669
    # Of the ids that may be drawn the first, and the one behind the last; (): all but the
    # mask. Softmaxes of sampling and training are over these.
    drawn: tuple[int, ...] = ()
    eos_id: int = 151643
    ends: tuple[int, ...] = ()  # ids that end an answer, too
    pad_id: int = 151643
    dtype: str = "bfloat16"  # of computation; parameters keep their own
    remat: str = "none"  # a key of transformer.REMAT: what the backward pass recomputes
    kernels: str = "auto"  # one of pallas_kernels.CHOICES
    lora: Lora | None = None  # then only its adapters (and value heads) are parameters
    vision: VisionConfig | None = None  # the tower beside this one: see vision/soft.py
    tiles: int = 0  # of images that are looked at together; 0: none are
    train_tower: bool = False  # the vision tower, too; its projector always is

    def __post_init__(self):
        sizes = ("vocab", "d_model", "heads", "kv_heads", "head_dim", "block")
        counts = ("ffw", "codebook", "positions", "experts_per_token", "expert_ffw")
        counts += ("shared_experts", "dense_layers", "eos_id", "pad_id", "tiles")
        counts += ("ends",)
        checks.fields(
            self,
            **dict.fromkeys(sizes, ">= 1"),
            **dict.fromkeys(counts, ">= 0"),
            # What has more is no model: its parameters would take minutes to name.
            layers=">= 1, <= 1000",
            experts=">= 0, <= 4096",
            norm_eps=">= 0",
            rope_theta="> 0",
            rotary="> 0, <= 1",
            sparse_step=">= 1",
            router_groups=">= 1",
            router_best_groups=">= 1",
        )
        if self.drawn and not (
            len(self.drawn) == 2 and 0 <= self.drawn[0] < self.drawn[1] <= self.vocab
        ):
            raise checks.Refused("drawn", f"={self.drawn}: a range of 0..{self.vocab}")
        if self.lora and self.lora.rank > self.d_model:
            raise ValueError(
                f"model.lora_rank={self.lora.rank}: at most {self.d_model}, the model's width"
            )
        if self.dense_layers and self.sparse_step > 1:
            raise ValueError("dense layers come first, or between others, but not both")

    @property
    def layer_numbers(self) -> dict[str, tuple[int, ...]]:
        """Letter of a stack of layers -> the place of each in the tower, counted from 0.

        Y are the dense layers of a tower with experts; L are all others.
        """
        step = self.sparse_step
        last_of_step = range(self.dense_layers + step - 1, self.layers, step)
        return {
            "L": tuple(last_of_step),
            "Y": tuple(i for i in range(self.layers) if i not in last_of_step),
            **(self.vision.layer_numbers if self.vision else {}),
        }

    @property
    def soft(self) -> int:
        """How many ids behind the vocabulary stand for parts of images: see vision/soft.py.

        A tile gives its patches, and with others beside it a newline for each row of them.
        """
        if not self.vision:
            return 0
        return self.tiles * (self.vision.patches + self.vision.across)

    @property
    def looks(self) -> bool:
        """Whether prompts may hold images, as soft tokens or as codes."""
        return bool(self.soft or self.codebook)

    @property
    def sizes(self) -> dict[str, int]:
        """Dimension letter of a parameter -> size; see `layer_numbers` for L and Y."""
        return {
            "V": self.vocab,
            "D": self.d_model,
            "L": len(self.layer_numbers["L"]),
            "Y": len(self.layer_numbers["Y"]),
            "N": self.heads,
            "K": self.kv_heads,
            "H": self.head_dim,
            "F": self.ffw,
            "E": self.experts,
            "I": self.expert_ffw,
            "Z": self.shared_experts * self.expert_ffw,
            "C": self.lora.rank if self.lora else 0,
            "2": 2,  # a pair
            # A key head's queries, its key and its value.
            "J": self.heads // self.kv_heads + 2,
            "M": self.soft,
            "o": self.d_model,  # the inner width of an image's projector
            **(self.vision.sizes if self.vision else {}),
        }
