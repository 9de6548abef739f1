"""Programs of models with images, for chips that are not here: LLaDA-V's, and MAGVIT-v2."""

import pytest

from benchmarks import programs, topologies
from dllm_jax.models.vision import codes

GIB = 2**30


@pytest.mark.parametrize("topology", ["h200:8", "v5p:2x2x1"])
def test_a_model_that_looks_fits_with_all_that_a_run_keeps(topology, capsys):
    """A TPU's compiler takes minutes for the update: `programs.Run.update` by hand."""
    try:
        run = programs.Run("llada-v-8b", topology)
    except topologies.SkipReason as reason:
        pytest.skip(str(reason))
    resident = sum(run.resident.values())
    assert run.resident["images"] > 0
    place = run.sampling
    needs = {
        "tower": topologies.peak_bytes(run.tower()) + resident,
        "rollout": topologies.peak_bytes(run.rollout(place)) + resident,
    }
    if topology.startswith("h"):
        needs["update"] = topologies.peak_bytes(run.update()[0])
    with capsys.disabled():
        sizes = {"kept": resident} | needs
        told = {name: f"{size / GIB:.2f} GiB" for name, size in sizes.items()}
        print(f"\nllada-v-8b {topology}: {told} of {run.limit / GIB:.2f}")
    for name, size in needs.items():
        assert resident < size <= run.limit, name


@pytest.mark.parametrize("topology", ["h200:1"])
def test_images_become_codes_and_come_back(topology, capsys):
    """MAGVIT-v2 as released, on images of 512 pixels a side, as many as are coded at once.

    A TPU's compiler takes minutes for these convolutions: `programs.codec` by hand.
    """
    try:
        made = programs.codec(topology, codes.TOGETHER)
    except topologies.SkipReason as reason:
        pytest.skip(str(reason))
    needs = {name: topologies.peak_bytes(program) for name, program in made.items()}
    with capsys.disabled():
        sizes = {name: f"{size / GIB:.2f} GiB" for name, size in needs.items()}
        print(f"\nmagvit-v2 {topology}: {sizes}")
    for size in needs.values():
        assert GIB / 4 < size <= topologies.hbm_bytes(topology) / 4
