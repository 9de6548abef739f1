"""Eight fake CPU devices and exact matmuls, set before JAX starts; the tiny model."""

import gc
import os
import pathlib
import sys
import tempfile

from tests.served import HASTY, RARELY

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + f" --xla_force_host_platform_device_count=8 {HASTY}"
)
os.environ.setdefault("NPROC", "32")  # threads of XLA's pool: compiler.spare_threads
# What commands compile, each in a process of its own, is compiled once. The folder goes when
# the process that made it ends, not a worker of xdist.
if "PYTEST_XDIST_WORKER" not in os.environ:
    COMPILED = tempfile.TemporaryDirectory(prefix="compiled_by_tests_")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = COMPILED.name
    # So is Python where nothing may be left beside its source: jax's alone takes seconds
    # in each of the many processes that tests start.
    if sys.dont_write_bytecode:
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        os.environ["PYTHONPYCACHEPREFIX"] = os.path.join(COMPILED.name, "python")
        sys.pycache_prefix = os.environ["PYTHONPYCACHEPREFIX"]
        sys.dont_write_bytecode = False
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"  # nobody reads where an op is from

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dllm_jax.models import transformer
from dllm_jax.models.config import ModelConfig
from dllm_jax.pallas_kernels import held_pages
from tests import properties

hypothesis.settings.load_profile("test")  # `make soak` names another
gc.set_threshold(*RARELY)
# Of what tests compile in this process hardly anything is found again in a file, and writing
# it there took a fifteenth of their time.
jax.config.update("jax_enable_compilation_cache", False)
jax.config.update("jax_default_matmul_precision", "highest")
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_configure(config):
    """Lets examples that fail be told as tests to add."""
    config.pluginmanager.register(properties, "properties")


# The files that take longest, in that order: with two workers, one that begins last
# leaves the other idle.
LONG = ("train", "processes", "badinput", "generate", "canvases", "learner", "eval")
LONG += ("denoise", "paged", "engine", "moe", "looking", "attention", "drawing_runs")
LONG += ("checkpoint", "policy", "sandbox", "look", "math", "budget", "placement")
LONG += ("transformer", "trajectories", "acting", "browser", "token_logprob")
LONG += ("answers", "judge")


def pytest_collection_modifyitems(items):
    """Lets the long files begin first, those of `make soak` before all."""

    def rank(item):
        name = item.path.stem.removesuffix("_test")
        if item.path.parent.name == "soak":
            return -1
        return LONG.index(name) if name in LONG else len(LONG)

    items.sort(key=rank)


MAPPINGS = 50_000  # beyond 65,530, Linux's limit, compilation crashes


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """Drops programs where there are many: files share them, but each maps memory."""
    yield
    maps = pathlib.Path("/proc/self/maps")
    if not maps.exists() or maps.read_bytes().count(b"\n") > MAPPINGS:
        jax.clear_caches()
        gc.collect()


@pytest.fixture
def one_width(monkeypatch):
    """Lets attention over pages be compiled for whole tables: its widths are paged_test's."""
    monkeypatch.setattr(held_pages, "widths", lambda A, least: [A])


@pytest.fixture(scope="session")
def tiny():
    """A small random model that is sure of some answers: (ModelConfig, params)."""
    cfg = ModelConfig(
        vocab=67,
        d_model=32,
        layers=2,
        heads=16,
        kv_heads=8,
        head_dim=8,
        ffw=64,
        mask_id=66,
        eos_id=1,
        pad_id=0,
        dtype="float32",
    )
    rng = np.random.default_rng(0)

    def weight(spec):
        # Of std 0.4: at 0.02 every distribution is flat and no threshold bites.
        noise = rng.normal(size=transformer.shape(spec, cfg))
        return jnp.asarray(0.4 * noise if spec.init == "normal" else 1 + 0.2 * noise)

    return cfg, jax.tree.map(weight, transformer.specs(cfg))
