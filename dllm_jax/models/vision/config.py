"""What a vision tower is, and how it is read from a config.json.

Two kinds of folders tell it: SigLIP's own (TOWERS), and LLaDA-V's, whose language tower has
one beside it.
"""

import dataclasses
import pathlib
import re

from dllm_jax import checks

# SigLIP2 so400m/14-384, which LLaDA-V's config.json names and does not describe.
SO400M = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "image_size": 384,
    "patch_size": 14,
}
# What transformers assumes where a vision_config is silent.
SIGLIP = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 224,
    "patch_size": 16,
    "layer_norm_eps": 1e-6,
}
TOWERS = ("siglip", "siglip_vision_model")  # model_type of folders with nothing else
KEYS = {  # a field of VisionConfig -> its key
    "width": "hidden_size",
    "ffw": "intermediate_size",
    "heads": "num_attention_heads",
    "side": "image_size",
    "patch": "patch_size",
    "norm_eps": "layer_norm_eps",
}


@dataclasses.dataclass(frozen=True)
class VisionConfig:
    """A SigLIP tower, and how an image is cut into tiles for it. Hashable."""

    family: str = "siglip"
    width: int = 1152
    ffw: int = 4304
    layers: int = 26  # that are run: all but the checkpoint's last
    heads: int = 16
    side: int = 384  # pixels of a tile, in both directions
    patch: int = 14  # pixels of a patch
    norm_eps: float = 1e-6
    canvases: tuple[tuple[int, int], ...] = ()  # (width, height) that tiles may fill
    # Tiles' worth of features at most of an image, beside its base; 0: all.
    cap: int = 0
    dtype: str = "float32"

    def __post_init__(self):
        sizes = ("width", "ffw", "heads", "side", "patch")
        checks.fields(
            self,
            **dict.fromkeys(sizes, ">= 1, <= 100000"),
            layers=">= 1, <= 1000",
            norm_eps=">= 0",
            cap=">= 0, <= 1000",
        )
        if self.width % self.heads:
            raise checks.Refused(
                "heads", f"={self.heads}: they must divide the width {self.width}"
            )
        if self.patch > self.side:
            raise checks.Refused(
                "patch", f"={self.patch}: at most the side {self.side}"
            )
        for canvas in self.canvases:
            if len(canvas) != 2 or not all(
                type(x) is int and x > 0 and x % self.side == 0 and x <= 64 * self.side
                for x in canvas
            ):
                raise checks.Refused(
                    "canvases",
                    f" has {checks.shown(canvas)}: both must be 1 to 64 times {self.side}",
                )

    @property
    def across(self) -> int:
        """Patches of a tile in each direction; pixels that fill none are dropped."""
        return self.side // self.patch

    @property
    def patches(self) -> int:
        """Patches of a tile."""
        return self.across**2

    @property
    def layer_numbers(self) -> dict[str, tuple[int, ...]]:
        """Letter of the stack of layers -> the place of each: see ModelConfig's."""
        return {"l": tuple(range(self.layers))}

    @property
    def sizes(self) -> dict[str, int]:
        """Dimension letter of a parameter -> size: see siglip.py."""
        return {
            "l": self.layers,
            "e": self.width,
            "a": self.width,
            "f": self.ffw,
            "p": self.patches,
            "c": 3,
            "y": self.patch,
            "x": self.patch,
        }


def of_tower(told: dict, known: dict, file: pathlib.Path, **more) -> VisionConfig:
    """Returns the VisionConfig of a vision_config; known: what stands for missing keys.

    Raises ValueError naming the key of `file` that makes no tower.
    """
    if type(told) is not dict:
        raise ValueError(f"{file}: its vision tower is {checks.shown(told)}")
    raw = SIGLIP | known | told
    act = raw.get("hidden_act", "gelu_pytorch_tanh")
    if act != "gelu_pytorch_tanh":
        raise ValueError(f"{file}: hidden_act={checks.shown(act)} is not supported")
    layers = raw["num_hidden_layers"]
    if type(layers) is not int or layers < 2:
        raise ValueError(
            f"{file}: num_hidden_layers={checks.shown(layers)}: a tower needs 2 or more, "
            "as its last layer is not run"
        )
    try:
        fields = {field: raw[key] for field, key in KEYS.items()}
        return VisionConfig(layers=layers - 1, **fields, **more)
    except checks.Refused as error:
        names = KEYS | {"canvases": "image_grid_pinpoints"}
        name = names.get(error.field, error.field)
        raise ValueError(f"{file}: {name}{error.text}") from None


def of_siglip(raw: dict, file: pathlib.Path) -> VisionConfig:
    """Returns the VisionConfig of a SigLIP folder's config.json."""
    told = raw.get("vision_config", raw)
    return of_tower(told, {}, file, family=raw["model_type"])


def of_llava(raw: dict, file: pathlib.Path) -> VisionConfig:
    """Returns the VisionConfig of a LLaDA-V folder's config.json."""
    told, name = raw.get("vision_tower_config"), raw.get("mm_vision_tower")
    known = SO400M if isinstance(name, str) and "so400m" in name else {}
    if told is None and not known:
        raise ValueError(
            f"{file}: mm_vision_tower={checks.shown(name)} is not known, and there is no "
            "vision_tower_config"
        )
    ratio = raw.get("image_aspect_ratio")
    capped = re.fullmatch(r"anyres_max_([1-9]\d{0,2})", str(ratio))
    if not capped and ratio != "anyres":
        raise ValueError(
            f"{file}: image_aspect_ratio={checks.shown(ratio)} is not supported: anyres or "
            "anyres_max_N"
        )
    points = raw.get("image_grid_pinpoints")
    if not isinstance(points, list) or not 0 < len(points) <= 4096:
        raise ValueError(
            f"{file}: image_grid_pinpoints={checks.shown(points)}: a list of [width, height]"
        )
    canvases = tuple(tuple(x) if isinstance(x, list) else (x,) for x in points)
    cap = int(capped[1]) if capped else 0
    return of_tower(told or {}, known, file, canvases=canvases, cap=cap)
